"""What the two generating endpoints differ in, as a seam: reading a request and the shapes of an answer.

`chat` and `completions` implement it; `service` drives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from paceline_server.engine.interface import FinishReason
from paceline_server.gateway.cost import cost_of
from paceline_server.gateway.exchange import Exchange
from paceline_server.gateway.model_text import ModelText
from paceline_server.gateway.requests import GenerationFields

Json = dict[str, Any]
Fields = TypeVar("Fields", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats; `service_tier` only where the client asked for one."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None

    def json(self, kind: str) -> Json:
        """The fields of the head, in an object of this kind."""
        head = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        return head if self.service_tier is None else {**head, "service_tier": self.service_tier}


class Endpoint(Protocol[Fields]):
    """One generating endpoint.

    Attributes:
        fields: the model of its requests.
        id_prefix: of the ids of its answers.
        kind: `object` of a whole answer.
        chunk_kind: `object` of a chunk.
        prompt_field: where the prompt is, for errors.
        continues_prompt: the answer goes on from the prompt's text instead of standing alone.
    """

    fields: type[Fields]
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prompt_field: ClassVar[str]
    continues_prompt: ClassVar[bool]

    async def encode(self, fields: Fields, text: ModelText) -> Sequence[int]:
        """The prompt's token ids."""
        ...

    def opening(self, index: int) -> list[Json]:
        """Chunks' choices that open one choice of a stream."""
        ...

    def piece(self, index: int, text: str) -> Json:
        """The choice of a chunk that carries text."""
        ...

    def closing(self, index: int, finish: FinishReason) -> Json:
        """The choice of the last chunk of one choice of a stream."""
        ...

    def whole(self, index: int, text: str, finish: FinishReason) -> Json:
        """One choice of a whole answer."""
        ...


def finish_fields(finish: FinishReason | None) -> Json:
    """How a choice ended, in words that every client knows.

    Clients with a closed set of reasons fail on a new one. An answer that ran out of its time is cut short, which is
    what `length` says; why is said beside it, in the words of OpenAI's responses.
    """
    if finish is FinishReason.TIMEOUT:
        return {"finish_reason": FinishReason.LENGTH, "incomplete_details": {"reason": "deadline_exceeded"}}
    return {"finish_reason": finish}


def usage(exchange: Exchange) -> Json:
    """The `usage` object of an answer."""
    counts: Json = {
        "prompt_tokens": exchange.prompt_tokens,
        "completion_tokens": exchange.completion_tokens,
        "total_tokens": exchange.prompt_tokens + exchange.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": exchange.cached_tokens},
    }
    return priced(counts, exchange)


def priced(counts: Json, exchange: Exchange) -> Json:
    """`usage` with the cost, where the tenant has prices; what we add to OpenAI's is under a name of ours."""
    prices = exchange.tenant.config.prices if exchange.tenant else None
    if prices is None:
        return counts
    cost = cost_of(prices, exchange.prompt_tokens, exchange.cached_tokens, exchange.completion_tokens)
    return {**counts, "paceline": {"cost": cost.json()}}
