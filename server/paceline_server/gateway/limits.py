"""Reads request bodies within bounds of size, time and sum. Called by `service`.

Content-Length is a promise, and a chunked body makes none: bytes are counted as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from paceline_server.errors import InvalidRequest, Overloaded, PayloadTooLarge, RequestTimeout

GRACE_SECONDS = 15.0
"""A body may take that long, and longer by what it brings at `MIN_BYTES_PER_SECOND`."""
MIN_BYTES_PER_SECOND = 16 * 1024
BODIES_AT_ONCE = 8  # full-sized ones; smaller ones are many more

_RETRY_AFTER_SECONDS = 1.0
_SHOWN_CHARS = 40


class BodyReader:
    """Reads bodies for one server.

    Args:
        max_bytes: largest body.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """The whole body; its bytes count against all bodies' sum until the context is left.

        Raises:
            InvalidRequest: compressed in either layer, or broken off.
            PayloadTooLarge: more than `max_bytes`, announced or received.
            RequestTimeout: it comes too slowly.
            Overloaded: too many large bodies are held at once.
        """
        _refuse_codings(request)
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        received = bytearray()
        try:
            await self._receive(request, received)
            yield bytes(received)
        finally:
            self._held_bytes -= len(received)

    async def _receive(self, request: web.Request, received: bytearray) -> None:
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(begun + GRACE_SECONDS) as scope:
                while chunk := await request.content.readany():
                    received += chunk
                    self._held_bytes += len(chunk)
                    self._check_sums(len(received))
                    scope.reschedule(begun + GRACE_SECONDS + len(received) / MIN_BYTES_PER_SECOND)
        except TimeoutError:
            raise RequestTimeout(
                f"the body comes too slowly: {len(received)} bytes after {GRACE_SECONDS:g} s or more"
            ) from None
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body is broken off or not framed as its headers say: {error}") from None

    def _check_sums(self, received: int) -> None:
        if received > self._max_bytes:
            raise self._too_large()
        if self._held_bytes > BODIES_AT_ONCE * self._max_bytes:
            raise Overloaded(
                "too many large requests are being read", code="bodies_full", retry_after=_RETRY_AFTER_SECONDS
            )

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._max_bytes} bytes (gateway.max_body_bytes)")


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
