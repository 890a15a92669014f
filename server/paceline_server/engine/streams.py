"""The requests that the gateway has under way at the engine, and what has come for each. Used by `client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline_server.engine.interface import EmbeddingOutput, FinishReason, PrefixList, TokenOutput
from paceline_server.errors import DeadlineExceeded, EngineLost, InvalidRequest, Overloaded, RequestError

Items: TypeAlias = asyncio.Queue[TokenOutput | EmbeddingOutput | PrefixList | Exception]
"""What comes for one request, in order; an error is the last of it."""


@dataclass(slots=True)
class _Stream:
    """A request under way.

    Attributes:
        open: indexes of its answers that have not ended.
    """

    open: set[int]
    items: Items = field(default_factory=asyncio.Queue)


class Streams:
    """Requests under way, by id. One whose last answer has come is gone; its reader still has the queue."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    def open(self, request_id: str, answers: int) -> Items:
        """Begin a request that gets so many answers."""
        stream = self._streams[request_id] = _Stream(set(range(answers)))
        return stream.items

    def close(self, request_id: str) -> bool:
        """Its reader leaves; returns whether the engine is still at it."""
        return self._streams.pop(request_id, None) is not None

    def cut(self, request_id: str, index: int) -> bool:
        """Nobody reads one of its answers any more; returns whether the engine is still at that."""
        stream = self._streams.get(request_id)
        if stream is None or index not in stream.open:
            return False
        stream.open.remove(index)
        return True

    def deliver(self, output: TokenOutput) -> None:
        """Hand over tokens; those of an answer that was left a moment ago are for nobody."""
        stream = self._streams.get(output.request_id)
        if stream is None or output.index not in stream.open:
            return
        stream.items.put_nowait(output)
        if output.finish is not None:
            stream.open.remove(output.index)
            if not stream.open:
                del self._streams[output.request_id]

    def end(self, request_id: str, item: EmbeddingOutput | PrefixList | Exception) -> None:
        """Hand over the last that there is for a request."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.items.put_nowait(item)

    def lose(self) -> None:
        """The engine is gone: every request ends with an error."""
        lost, self._streams = self._streams, {}
        for stream in lost.values():
            stream.items.put_nowait(
                EngineLost("the engine process died while it worked on this request; it is being restarted")
            )


async def tokens(items: Items, answers: int) -> AsyncIterator[TokenOutput]:
    """What comes for a request, until all its answers have ended; one that is cut has its reader leave before that."""
    started = False
    while True:
        item = await _next(items)
        assert isinstance(item, TokenOutput), "a request to generate was answered with vectors"
        if item.finish is FinishReason.TIMEOUT and not started:
            raise DeadlineExceeded("the request's time was over before it could start")
        started = True
        yield item
        answers -= item.finish is not None
        if not answers:
            return


async def embedding(items: Items) -> EmbeddingOutput:
    """The one answer to a request to embed."""
    item = await _next(items)
    assert isinstance(item, EmbeddingOutput), "a request to embed was answered with tokens"
    if item.vectors is None:
        raise DeadlineExceeded("the request's timeout was over before all its texts were embedded")
    return item


async def prefix_list(items: Items) -> PrefixList:
    """The one answer to the question for hot prefixes."""
    item = await _next(items)
    assert isinstance(item, PrefixList), "the question for prefixes was answered with something else"
    return item


async def _next(items: Items) -> TokenOutput | EmbeddingOutput | PrefixList:
    item = await items.get()
    if isinstance(item, Exception):
        raise item
    return item


def refusal(message: str, retry_after: float | None) -> RequestError:
    """The error of a request that the engine does not take: now, or never (None)."""
    if retry_after is None:
        return InvalidRequest(message)
    return Overloaded(f"overloaded: {message}", code="deadline", retry_after=retry_after)
