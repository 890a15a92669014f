"""Server-sent events: one `data:` frame per chunk, and how a stream ends. Called by `service` and `middleware`.

A stream that ends well ends with `data: [DONE]`. One that fails has a frame with an `error` object as its last, and
no `[DONE]`, so that nobody takes the text for complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web


class EventStream:
    """One answer as an event stream. The head goes out with the first frames.

    What the client does not read stays in the socket's buffers: when they are full, `send` waits, and with it the whole
    request. Only token ids of this one answer pile up behind it, at most `max_tokens` of them.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would hold frames back
                **headers,
            }
        )

    async def send(self, *chunks: Mapping[str, Any]) -> None:
        """Write one frame per chunk, together.

        Raises:
            ConnectionResetError: the client is gone, or has read nothing for too long (`connection`).
        """
        if chunks:
            await self._write(b"".join(map(_frame, chunks)))

    async def finish(self) -> None:
        """End a stream that is complete."""
        await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def fail(self, envelope: Mapping[str, Any]) -> None:
        """End a stream that broke off, with an error frame as its last."""
        await self._write(_frame(envelope))
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(data)


def _frame(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
