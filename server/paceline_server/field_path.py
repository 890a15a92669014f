"""How a field of a nested document is named in messages: as kubectl and the Kubernetes API name it.

Used by `config`, `model` and `gateway` on what pydantic finds.
"""

from __future__ import annotations

from collections.abc import Iterable


def field_path(location: Iterable[str | int]) -> str:
    """`tenants[0].name` of ("tenants", 0, "name"); the document itself has the empty path."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(steps).removeprefix(".")
