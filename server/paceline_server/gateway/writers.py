"""How an answer goes out: in one piece, or as it comes. Made by `service` for one request, fed by `generation`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from paceline_server.gateway.answers import Endpoint, Head, Json, usage
from paceline_server.gateway.assembly import Delta
from paceline_server.gateway.exchange import EXCHANGE, Exchange
from paceline_server.gateway.stream import EventStream


class Whole:
    """Collects the choices of an answer and gives them out in one piece.

    Args:
        n: choices.
    """

    def __init__(self, exchange: Exchange, endpoint: Endpoint[Any], head: Head, n: int) -> None:
        self._exchange = exchange
        self._endpoint = endpoint
        self._head = head
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._choices: dict[int, Json] = {}

    async def take(self, index: int, delta: Delta) -> None:
        """Keep what came for one choice."""
        self._texts[index].append(delta.text)
        if delta.finish is not None:
            self._choices[index] = self._endpoint.whole(index, "".join(self._texts[index]), delta.finish)

    async def finish(self) -> web.StreamResponse:
        """The answer, when all choices have ended."""
        choices = [self._choices[index] for index in range(len(self._texts))]
        body = {**self._head.json(self._endpoint.kind), "choices": choices, "usage": usage(self._exchange)}
        return web.json_response(body)


class Streamed:
    """Gives out an answer as it comes. A choice is opened with its first tokens and closed with its last.

    Args:
        include_usage: end with a chunk of usage.
    """

    def __init__(self, request: web.Request, endpoint: Endpoint[Any], head: Head, *, include_usage: bool) -> None:
        self._exchange = request[EXCHANGE]
        self._endpoint = endpoint
        self._head = head
        self._include_usage = include_usage
        self._stream = EventStream(request, self._exchange.headers)
        self._opened: set[int] = set()

    async def take(self, index: int, delta: Delta) -> None:
        """Send what came for one choice."""
        choices = [] if index in self._opened else self._endpoint.opening(index)
        if delta.text:
            choices.append(self._endpoint.piece(index, delta.text))
        if delta.finish is not None:
            choices.append(self._endpoint.closing(index, delta.finish))
        if choices:
            self._opened.add(index)
            self._exchange.stream = self._stream
            await self._stream.send(*(self._chunk([choice]) for choice in choices))

    async def finish(self) -> web.StreamResponse:
        """End the stream, when all choices have ended."""
        if self._include_usage:
            await self._stream.send({**self._chunk([]), "usage": usage(self._exchange)})
        await self._stream.finish()
        return self._stream.response

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head.json(self._endpoint.chunk_kind), "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk
