"""What all groups of the configuration have in common. Used by the package's other modules."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(
            "must begin with /, such as /tmp/NAME: a relative path would lie wherever the server was started"
        )
    return path


AbsolutePath = Annotated[str, Field(min_length=1), AfterValidator(_absolute)]


class Group(BaseModel):
    """A group of keys: frozen, nothing unknown, nothing coerced, no number infinite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
