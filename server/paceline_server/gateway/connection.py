"""One client's connection: how HTTP itself is refused, and how long a client may read nothing. Used by `serve`.

What aiohttp cannot parse never reaches the application. aiohttp answers it in plain text and logs a traceback for it,
as if the server were at fault. Here it gets the error envelope of every other refusal, and one line in the log. A
client that goes away while it is written to is no fault either: its line in the access log says so. One that stays, and
reads nothing, must not hold its answer for ever.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from paceline_server.errors import InvalidRequest

log = logging.getLogger("paceline.gateway")

STALLED_SECONDS = 60.0
"""A client that takes nothing for that long, while its buffers are full, is taken for gone."""

_SHOWN_CHARS = 200


class GatewayRunner(web.AppRunner):
    """Runs an application on connections that refuse as the gateway does."""

    async def _make_server(self) -> web.Server:  # where aiohttp's runners differ from one another
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """One client's connection.

    A writer waits while the client's buffers are full, of a stream as of a whole answer. Where nothing of what is left
    goes out for `STALLED_SECONDS`, the connection is lost, and its handler with it.
    """

    __slots__ = ("_stall",)

    _stall: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let writes wait until all is with the socket: what is in our own buffers when a drain ends is lost."""
        super().connection_made(transport)
        cast("asyncio.Transport", transport).set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        """The buffers are full: watch whether the client reads."""
        super().pause_writing()
        self._watch(self._unsent())

    def resume_writing(self) -> None:
        """All is with the socket."""
        super().resume_writing()
        self._stall.cancel()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nobody is there to be watched."""
        if self.writing_paused:
            self._stall.cancel()
        super().connection_lost(exc)

    def _unsent(self) -> int:
        assert self.transport is not None
        return self.transport.get_write_buffer_size()

    def _watch(self, unsent: int) -> None:
        self._stall = self._loop.call_later(STALLED_SECONDS, self._check, unsent)

    def _check(self, before: int) -> None:
        unsent = self._unsent()
        if unsent < before:
            self._watch(unsent)
        else:
            cast("asyncio.Transport", self.transport).abort()  # closing would wait for the buffers to be read

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that is no HTTP; faults of the server go aiohttp's way.

        Raises:
            ConnectionError: the client is gone; aiohttp closes the connection.
        """
        if isinstance(exc, ConnectionError):
            raise exc
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        reason = " ".join((message or exc.message).split()).removesuffix(" ^")[:_SHOWN_CHARS]  # a pointer into a line
        log.info("refused what is no HTTP request, from %s: %s", request.remote, reason)
        error = InvalidRequest(f"the request is no valid HTTP: {reason}")
        response = web.json_response(error.envelope(), status=status)
        response.force_close()
        return response


async def answer_expect(request: web.Request) -> web.Response | None:
    """Invite the body of a client that waits for it, or refuse what else the header Expect asks for."""
    expected = request.headers["Expect"]
    if request.version < HttpVersion11:
        return None
    if expected.lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # aiohttp takes an answer with bytes written for one that has begun
        return None
    error = InvalidRequest(f"Expect: {expected[:_SHOWN_CHARS]!r} is not supported; only 100-continue is")
    return web.json_response(error.envelope(), status=HTTPStatus.EXPECTATION_FAILED)
