"""Kubernetes resource quantities (`500m`, `2Gi`, `1e3`) as numbers. Used by `machine` to see what fits."""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(r"(?P<number>[+-]?[0-9]*\.?[0-9]+|[+-]?[0-9]+\.)(?P<suffix>[a-zA-Z]{0,2})(?P<exponent>[+-]?[0-9]*)")
_SUFFIXES = {
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("n", "u", "m"), start=-3)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
}
"""https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""


def parse_quantity(text: str | float) -> Decimal:
    """The value of a quantity in its unit (cores, bytes, pieces).

    Raises:
        ValueError: when it is not a quantity.
    """
    match = _FORM.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a quantity such as 500m, 2 or 4Gi")
    number, suffix, exponent = match["number"], match["suffix"], match["exponent"]
    if exponent and suffix in ("e", "E"):
        return Decimal(number) * Decimal(10) ** int(exponent)
    if exponent or suffix not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity such as 500m, 2 or 4Gi")
    return Decimal(number) * _SUFFIXES[suffix]
