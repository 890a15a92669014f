"""What all sections of the specification have in common. Used by `spec` and the modules of its sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Count = Annotated[int, Field(ge=1)]


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(
            "must begin with /, such as /tmp/NAME: a relative path would lie wherever the server was started"
        )
    return path


AbsolutePath = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_absolute)]


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
