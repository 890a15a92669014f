"""POST /v1/completions: a prompt as it is, and its continuation. Driven by `service`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from paceline_server.engine.interface import FinishReason
from paceline_server.errors import InvalidRequest
from paceline_server.gateway.answers import Json, finish_fields
from paceline_server.gateway.model_text import ModelText
from paceline_server.gateway.requests import CompletionRequest


class CompletionEndpoint:
    """Implements `answers.Endpoint`."""

    fields = CompletionRequest
    id_prefix: ClassVar[str] = "cmpl-"
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"
    prompt_field: ClassVar[str] = "prompt"
    continues_prompt: ClassVar[bool] = True

    async def encode(self, fields: CompletionRequest, text: ModelText) -> Sequence[int]:
        """The prompt's token ids.

        Raises:
            InvalidRequest: no tokens, or ids outside the vocabulary.
        """
        if isinstance(fields.prompt, str):
            ids: Sequence[int] = await text.encode_prompt(fields.prompt)
        else:
            ids = fields.prompt
            text.refuse_unknown(ids, "prompt")
        if not ids:
            raise InvalidRequest("prompt: it has no tokens", param="prompt", code="invalid_value")
        return ids

    def opening(self, index: int) -> list[Json]:
        """Text begins with the first piece."""
        return []

    def piece(self, index: int, text: str) -> Json:
        """New text of the continuation."""
        return _choice(index, text, None)

    def closing(self, index: int, finish: FinishReason) -> Json:
        """Empty text with the reason."""
        return _choice(index, "", finish)

    def whole(self, index: int, text: str, finish: FinishReason) -> Json:
        """The whole continuation."""
        return _choice(index, text, finish)


def _choice(index: int, text: str, finish: FinishReason | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, **finish_fields(finish)}
