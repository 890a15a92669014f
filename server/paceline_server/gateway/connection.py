"""How HTTP itself is refused: what aiohttp cannot parse never reaches the application. Used by `serve`.

aiohttp answers such a request in plain text and logs a traceback for it, as if the server were at fault. Here it gets
the error envelope of every other refusal, and one line in the log. A client that goes away while it is written to is
no fault either: its line in the access log says so.
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
    """One client's connection."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let writes wait until all is with the socket: what is in our own buffers when a drain ends is lost."""
        super().connection_made(transport)
        cast("asyncio.Transport", transport).set_write_buffer_limits(high=0)

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
