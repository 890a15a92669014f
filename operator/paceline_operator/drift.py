"""Whether a live object still is what we applied: our intention is the same, and nobody else has changed our fields.

Saves the API call where nothing is to do. A false "differs" costs one call that changes nothing on the server; a false
"same" is impossible for what we mean, since the hash of our intention is compared first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final

from paceline_operator import names
from paceline_operator.cluster import Manifest

_QUANTITY: Final = re.compile(r"(?P<number>\d+(\.\d+)?([eE]\d+)?)(?P<unit>[numkMGTPE]|[KMGTPE]i)?")
_UNITS: Final[Mapping[str, Decimal]] = MappingProxyType(
    {
        **{unit: Decimal(10) ** (3 * power) for power, unit in zip(range(-3, 0), "num", strict=True)},
        **{unit: Decimal(10) ** (3 * power) for power, unit in enumerate("kMGTPE", start=1)},
        **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
    }
)


def differs(live: Manifest, desired: Manifest) -> bool:
    """Whether `desired` has to be applied to `live`."""
    marks = (manifest["metadata"].get("annotations", {}).get(names.ANNOTATION_APPLIED) for manifest in (live, desired))
    if len(set(marks)) > 1:
        return True
    # Owners are not compared: that the child is ours has been established, and others may add theirs.
    metadata = {key: desired["metadata"][key] for key in ("labels", "annotations")}
    return not _contains(live, {**desired, "metadata": metadata})


def _contains(live: Any, desired: Any) -> bool:
    """Whether every field of `desired` has its value in `live`, which may have more (defaults, other managers')."""
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            key in live and _contains(live[key], value) for key, value in desired.items()
        )
    if isinstance(desired, list):
        return (
            isinstance(live, list)
            and len(live) == len(desired)
            and all(_contains(*pair) for pair in zip(live, desired, strict=True))
        )
    return bool(live == desired) or _same_quantity(live, desired)


def _same_quantity(live: Any, desired: Any) -> bool:
    """`1000m` is stored as `1`: the API server writes quantities in a form of its own."""
    amounts = [_quantity(str(value)) for value in (live, desired)]
    return amounts[0] is not None and amounts[0] == amounts[1]


def _quantity(text: str) -> Decimal | None:
    match = _QUANTITY.fullmatch(text)
    return Decimal(match["number"]) * _UNITS.get(match["unit"] or "", Decimal(1)) if match else None
