"""What all sections of the specification have in common. Used by `spec` and the modules of its sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the specification: camelCase outside, immutable, nothing unknown, nothing coerced."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
    )
