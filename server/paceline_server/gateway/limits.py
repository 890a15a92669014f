"""Reads request bodies within bounds of size, time, number and sum. Called by `reception`.

Content-Length is a promise, and a chunked body makes none: bytes are counted as they come. Where the bounds of all
bodies together are reached, one that is still being read has to go: the largest for want of memory, the slowest for
want of places. A small body that comes at once is never that one, whatever others send.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import StreamReader, web

from paceline_server.errors import InvalidRequest, Overloaded, PayloadTooLarge, RequestTimeout

GRACE_SECONDS = 15.0
"""A body may fall that far behind `MIN_BYTES_PER_SECOND`; so it may pause for so long, and no longer."""
MIN_BYTES_PER_SECOND = 16 * 1024
BODIES_AT_ONCE = 8  # full-sized ones; smaller ones are many more
READ_AT_ONCE = 1024
SMALL_BYTES = 64 * 1024
"""Of every body so much is not part of the sum, which is that of large ones; their number bounds small ones."""

_RETRY_AFTER_SECONDS = 1.0
_SHOWN_CHARS = 40


@dataclass(slots=True, eq=False)
class Arrival:
    """How far one body has come. Times are seconds on one clock.

    Attributes:
        deadline: when it is late, if nothing more comes.
        received: bytes.
    """

    deadline: float
    received: int = 0

    @classmethod
    def begin(cls, now: float) -> Arrival:
        """A body of which nothing has come yet."""
        return cls(now + GRACE_SECONDS)

    @property
    def counted(self) -> int:
        """Its part of the sum of large bodies, in bytes."""
        return max(0, self.received - SMALL_BYTES)

    def note(self, size: int, now: float) -> None:
        """Bytes buy time, but none that could be saved up for a long pause."""
        self.received += size
        self.deadline = min(self.deadline + size / MIN_BYTES_PER_SECOND, now + GRACE_SECONDS)


class BodyReader:
    """Reads bodies for one server.

    Args:
        max_bytes: largest body.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: set[Arrival] = set()
        self._held_bytes = 0  # of the large ones' sum
        self._being_read: dict[Arrival, asyncio.Timeout] = {}

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """The whole body; its bytes count against all bodies' sum until the context is left.

        Raises:
            InvalidRequest: compressed in either layer, or broken off.
            PayloadTooLarge: more than `max_bytes`, announced or received.
            RequestTimeout: it comes too slowly.
            Overloaded: it had to go, as the largest of too large bodies or the slowest of too many.
        """
        _refuse_codings(request)
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        arrival = Arrival.begin(asyncio.get_running_loop().time())
        self._held.add(arrival)
        try:
            yield await self._receive(request, arrival)
        finally:
            self._release(arrival)

    async def _receive(self, request: web.Request, arrival: Arrival) -> bytes:
        try:
            async with asyncio.timeout_at(arrival.deadline) as scope:
                self._being_read[arrival] = scope
                if len(self._being_read) > READ_AT_ONCE:
                    self._dismiss(min(self._being_read, key=lambda one: one.deadline))
                return await self._read(request.content, arrival, scope)
        except TimeoutError:
            if arrival not in self._being_read:
                raise _full() from None
            raise RequestTimeout(
                f"the body comes too slowly: after {arrival.received} bytes it is {GRACE_SECONDS:g} s behind "
                f"{MIN_BYTES_PER_SECOND} bytes a second"
            ) from None
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body is broken off or not framed as its headers say: {error}") from None
        finally:
            self._being_read.pop(arrival, None)

    async def _read(self, content: StreamReader, arrival: Arrival, scope: asyncio.Timeout) -> bytes:
        received = bytearray()
        while True:
            chunk = await content.readany()
            if arrival not in self._being_read:  # dismissed while this chunk was on its way
                raise _full()
            if not chunk:
                return bytes(received)
            received += chunk
            self._note(arrival, len(chunk))
            scope.reschedule(arrival.deadline)

    def _note(self, arrival: Arrival, size: int) -> None:
        before = arrival.counted
        arrival.note(size, asyncio.get_running_loop().time())
        self._held_bytes += arrival.counted - before
        if arrival.received > self._max_bytes:
            raise self._too_large()
        while self._held_bytes > BODIES_AT_ONCE * self._max_bytes:
            largest = max(self._being_read, key=lambda one: one.received)
            if arrival.received == largest.received:
                raise _full()
            self._dismiss(largest)

    def _dismiss(self, arrival: Arrival) -> None:
        """End the reading of a body; what it held is free at once."""
        scope = self._being_read.pop(arrival)
        self._release(arrival)
        if not scope.expired():
            scope.reschedule(0.0)

    def _release(self, arrival: Arrival) -> None:
        if arrival in self._held:
            self._held.remove(arrival)
            self._held_bytes -= arrival.counted

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._max_bytes} bytes (gateway.max_body_bytes)")


def _full() -> Overloaded:
    return Overloaded(
        "more or larger bodies are on their way than this server holds, and this one is the slowest or the largest",
        code="bodies_full",
        retry_after=_RETRY_AFTER_SECONDS,
    )


def _refuse_codings(request: web.Request) -> None:
    """Refuse bodies that are more than framed: the chunks of a compressed transfer would be read as they are."""
    if any(coding != "identity" for coding in _codings(request, "Content-Encoding")):
        raise InvalidRequest("compressed bodies are not supported; send the body without Content-Encoding")
    unknown = [coding for coding in _codings(request, "Transfer-Encoding") if coding != "chunked"]
    if unknown:
        raise InvalidRequest(
            f"Transfer-Encoding {unknown[0][:_SHOWN_CHARS]!r} is not supported; send chunked alone, or Content-Length"
        )


def _codings(request: web.Request, header: str) -> list[str]:
    """The codings of a header that may stand several times; they have no case (RFC 9110)."""
    return [coding.strip().lower() for value in request.headers.getall(header, []) for coding in value.split(",")]
