"""What all groups of the configuration have in common. Used by the package's other modules."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]


class Group(BaseModel):
    """A group of keys: frozen, nothing unknown, nothing coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
