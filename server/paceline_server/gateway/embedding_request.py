"""What a client may send to /v1/embeddings. Called by `embeddings`; the rule for fields is that of `requests`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline_server.gateway.fields import (
    MAX_TIMEOUT_SECONDS,
    Label,
    RequestFields,
    Unsupported,
    only,
    texts_or_tokens,
)


class EmbeddingFields(RequestFields):
    """POST /v1/embeddings. `input` is texts or lists of token ids, one or several."""

    input: Annotated[tuple[str, ...] | tuple[tuple[int, ...], ...], BeforeValidator(texts_or_tokens)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    timeout: Annotated[float | None, Field(gt=0, le=MAX_TIMEOUT_SECONDS)] = None
    user: Label = None

    priority: Annotated[Any, only(0)] = None
    add_special_tokens: Annotated[Any, only(True)] = None
    truncate_prompt_tokens: Unsupported = None
