"""The frames between the gateway's process and the engine's, as msgpack arrays over a Unix socket pair.

`client` and `process` are the two ends. A frame is `[kind, payload]`; a payload is the array of a message's fields in
their order, so both ends must be of one version: they are always started together. Nothing outside the machine ever
reaches this socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypeAlias

import msgpack

from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.interface import (
    EmbeddingOutput,
    EmbeddingRequest,
    FinishReason,
    GenerationRequest,
    HotPrefix,
    ModelInfo,
    PrefixList,
    Task,
    Tier,
    TokenOutput,
)
from paceline_server.engine.status import EngineStats, StartupPhase


@dataclass(frozen=True, slots=True)
class Configure:
    """Gateway to engine, first of all: the whole configuration as JSON."""

    config: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Gateway to engine: start a request."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Embed:
    """Gateway to engine: embed texts."""

    request: EmbeddingRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Gateway to engine: nobody listens any more to this request, or to the answer of this index."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """Engine to gateway, while starting: a phase began or ended."""

    phase: StartupPhase


@dataclass(frozen=True, slots=True)
class Ready:
    """Engine to gateway: warmed up."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine to gateway: the start failed; the process ends. `reason` is a StartupError's."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Engine to gateway: a request that is not taken: now (`retry_after` in seconds), or never (None)."""

    request_id: str
    message: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Engine to gateway: what one step brought, and how the engine is; without outputs it is a heartbeat."""

    outputs: tuple[TokenOutput, ...]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Embedded:
    """Engine to gateway: the same from a model that embeds."""

    outputs: tuple[EmbeddingOutput, ...]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class AskPrefixes:
    """Gateway to engine: tell the hottest prefixes."""

    request_id: str
    limit: int


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Engine to gateway: the answer."""

    found: PrefixList


Message: TypeAlias = (
    Configure | Submit | Embed | Abort | Phase | Ready | Failed | Refused | Step | Embedded | AskPrefixes | Prefixes
)

_KINDS: tuple[type[Message], ...] = (
    Configure, Submit, Embed, Abort, Phase, Ready, Failed, Refused, Step, Embedded, AskPrefixes,
    Prefixes,
)  # fmt: skip
_PARTS = (
    GenerationRequest, SamplingParams, TokenOutput, EmbeddingRequest, EmbeddingOutput, ModelInfo, StartupPhase,
    EngineStats, PrefixList, HotPrefix,
)  # fmt: skip
_KIND_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}
_FIELDS: dict[type[Any], list[str]] = {kind: [field.name for field in fields(kind)] for kind in (*_KINDS, *_PARTS)}
_VALUES: dict[type[Any], attrgetter[Any]] = {
    kind: attrgetter(*names, names[0]) for kind, names in _FIELDS.items()
}  # two names at least: a tuple


def encode(message: Message) -> bytes:
    """One frame."""
    frame: bytes = msgpack.packb([_KIND_NUMBER[type(message)], message], default=_array)
    return frame


def _array(value: object) -> tuple[Any, ...]:
    values: tuple[Any, ...] = _VALUES[type(value)](value)
    return values[:-1]


class Decoder:
    """Turns the byte stream back into messages."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(use_list=False, max_buffer_size=1 << 30)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Messages that are complete with this piece of the stream."""
        self._unpacker.feed(data)
        for kind, payload in self._unpacker:
            yield _decode(_KINDS[kind], payload)


def _decode(kind: type[Message], payload: tuple[Any, ...]) -> Message:
    if kind is Submit:
        return Submit(_request(payload[0]))
    if kind is Phase:
        return Phase(StartupPhase(*payload[0]))
    if kind is Ready:
        return Ready(_info(payload[0]))
    if kind is Embed:
        return Embed(EmbeddingRequest(*payload[0]))
    if kind is Embedded:
        return Embedded(tuple(EmbeddingOutput(*item) for item in payload[0]), EngineStats(*payload[1]))
    if kind is Prefixes:
        request_id, identity, prefixes = payload[0]
        return Prefixes(PrefixList(request_id, identity, tuple(HotPrefix(*one) for one in prefixes)))
    if kind is Step:
        return Step(tuple(_output(item) for item in payload[0]), EngineStats(*payload[1]))
    return kind(*payload)


def _request(payload: tuple[Any, ...]) -> GenerationRequest:
    values = dict(zip(_FIELDS[GenerationRequest], payload, strict=True))
    return GenerationRequest(
        **{**values, "sampling": SamplingParams(*values["sampling"]), "tier": Tier(values["tier"])}
    )


def _info(payload: tuple[Any, ...]) -> ModelInfo:
    info = ModelInfo(*payload)
    return replace(info, task=Task(info.task))


def _output(payload: tuple[Any, ...]) -> TokenOutput:
    request_id, token_ids, finish, *rest = payload
    return TokenOutput(request_id, token_ids, None if finish is None else FinishReason(finish), *rest)
