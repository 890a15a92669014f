"""POST /v1/chat/completions: messages through the model's chat template, answers as messages. Driven by `service`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from paceline_server.engine.interface import FinishReason
from paceline_server.gateway.answers import Json, finish_fields
from paceline_server.gateway.model_text import ModelText
from paceline_server.gateway.requests import ChatRequest, Message


class ChatEndpoint:
    """Implements `answers.Endpoint`."""

    fields = ChatRequest
    id_prefix: ClassVar[str] = "chatcmpl-"
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    prompt_field: ClassVar[str] = "messages"
    continues_prompt: ClassVar[bool] = False

    async def encode(self, fields: ChatRequest, text: ModelText) -> Sequence[int]:
        """The rendered chat's token ids."""
        knows_developer = text.renderer is not None and text.renderer.template.knows_developer
        return await text.encode_chat([_for_template(message, knows_developer) for message in fields.messages])

    def opening(self, index: int) -> list[Json]:
        """The role comes in a first chunk of its own."""
        return [_chunk(index, {"role": "assistant", "content": ""}, None)]

    def piece(self, index: int, text: str) -> Json:
        """New text of the message."""
        return _chunk(index, {"content": text}, None)

    def closing(self, index: int, finish: FinishReason) -> Json:
        """An empty delta with the reason."""
        return _chunk(index, {}, finish)

    def whole(self, index: int, text: str, finish: FinishReason) -> Json:
        """The whole message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, **finish_fields(finish)}


def _chunk(index: int, delta: Json, finish: FinishReason | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, **finish_fields(finish)}


def _for_template(message: Message, knows_developer: bool) -> dict[str, str]:
    """A message as a template gets it: without absent fields, and developer as system where that is what it knows."""
    fields: dict[str, str] = message.model_dump(include={"role", "content", "name", "tool_call_id"}, exclude_none=True)
    if message.role == "developer" and not knows_developer:
        fields["role"] = "system"
    return fields
