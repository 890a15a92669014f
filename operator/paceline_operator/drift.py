"""Whether a live object still is what we applied: our intention is the same, and nobody else has changed our fields.

Saves the API call where nothing is to do. A false "differs" costs one call that changes nothing on the server; a false
"same" is impossible for what we mean, since the hash of our intention is compared first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.quantity import parse_quantity


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
    if not isinstance(live, str | int) or not isinstance(desired, str | int):
        return False
    try:
        return parse_quantity(live) == parse_quantity(desired)
    except ValueError:
        return False
