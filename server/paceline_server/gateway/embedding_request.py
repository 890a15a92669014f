"""What a client may send to /v1/embeddings. Called by `embeddings`; the rule for fields is that of `requests`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from paceline_server.gateway.fields import MAX_TIMEOUT_SECONDS, Label, Unsupported, only, texts_or_tokens


class EmbeddingFields(BaseModel):
    """POST /v1/embeddings. `input` is texts or lists of token ids, one or several."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    model: str
    input: Annotated[tuple[str, ...] | tuple[tuple[int, ...], ...], BeforeValidator(texts_or_tokens)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    timeout: Annotated[float | None, Field(gt=0, le=MAX_TIMEOUT_SECONDS)] = None
    user: Label = None

    priority: Annotated[Any, only(0)] = None
    add_special_tokens: Annotated[Any, only(True)] = None
    truncate_prompt_tokens: Unsupported = None
