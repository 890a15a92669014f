"""Kubernetes resource quantities (`500m`, `2Gi`, `1e3`) as numbers.

Used by `spec` to validate them, by `drift` to compare them, and by local mode to see what fits.
Form and suffixes: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Final

_FORM: Final = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE](?P<exponent>[+-]?[0-9]+)|(?P<suffix>[numkMGTPE]|[KMGTPE]i))?"
)
_SUFFIXES: Final[Mapping[str, Decimal]] = MappingProxyType(
    {
        "": Decimal(1),
        **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("n", "u", "m"), start=-3)},
        **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
        **{
            suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)
        },
    }
)


def parse_quantity(text: str | float) -> Decimal:
    """The value of a quantity in its unit (cores, bytes, pieces). Raises ValueError when it is not a quantity."""
    match = _FORM.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a quantity; write a string such as '500m', '2' or '4Gi'")
    if match["exponent"]:
        return Decimal(match["number"]) * Decimal(10) ** int(match["exponent"])
    return Decimal(match["number"]) * _SUFFIXES[match["suffix"] or ""]
