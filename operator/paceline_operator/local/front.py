"""The front door: what a Service is in a cluster, as a TCP proxy on this machine.

A new connection goes to the ready pod with the fewest open ones; a pod that ends, or is no longer ready, gets no new
ones and keeps those it has. Without a ready pod the caller gets a 503 in the shape of OpenAI's errors, with the reason
why the service is not ready. `LocalCluster` owns the one front door of its service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline_operator.cluster import Manifest
from paceline_operator.local import pod as pods_
from paceline_operator.local.race import first_of, forever
from paceline_operator.local.store import labels_match
from paceline_operator.ownership import is_alive
from paceline_operator.pods import is_ready

_CHUNK_BYTES = 65536
_REQUEST_HEAD_SECONDS = 5.0  # how long a caller that will be refused may take to say what it wants


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no endpoint, in OpenAI's words for an error that passes. `retry_after` is in seconds."""

    message: str
    code: str | None = None
    retry_after: int = 2

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The answer's body."""
        return {"error": {"message": self.message, "type": "overloaded_error", "param": None, "code": self.code}}


DRAINING = Refusal("the server is shutting down; send the request again", retry_after=1)
"""What a server that drains answers itself."""


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a pod listens."""

    host: str
    port: int


def endpoints(service: Manifest, pods: Sequence[Manifest]) -> tuple[Address, ...]:
    """Addresses of the pods that the Service leads to: ready, not terminating, chosen by its selector."""
    spec = service["spec"]
    return tuple(
        Address(pods_.POD_IP, pods_.port(pod, spec["ports"][0]["targetPort"]))
        for pod in pods
        if labels_match(spec["selector"], pod) and is_ready(pod) and is_alive(pod)
    )


class FrontDoor:
    """Listens on one address and leads to the endpoints of the moment.

    Args:
        find_endpoints: asked at every connection.
        explain: asked where there is no endpoint, for the caller who is refused.
    """

    def __init__(self, find_endpoints: Callable[[], Sequence[Address]], explain: Callable[[], Refusal]) -> None:
        self._find_endpoints = find_endpoints
        self._explain = explain
        self._open: Counter[Address] = Counter()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port, which is a free one where `port` is 0.

        Raises:
            OSError: another program listens there, or this user may not.
        """
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Take no new connections; those that are open go on."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            address, pod, to_pod = await self._connect()
        except ConnectionError:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await self._refuse(client, to_client)
        else:
            self._open[address] += 1
            try:
                with contextlib.suppress(OSError):  # one side is gone: both are closed
                    await first_of(_pump(pod, to_client), _upload(client, to_pod))
            finally:
                self._open[address] -= 1
                to_pod.close()
        finally:
            to_client.close()

    async def _connect(self) -> tuple[Address, asyncio.StreamReader, asyncio.StreamWriter]:
        """Reach the pod with the fewest connections, or the next one when it has just gone."""
        for address in sorted(self._find_endpoints(), key=lambda endpoint: self._open[endpoint]):
            with contextlib.suppress(OSError):
                return address, *await asyncio.open_connection(address.host, address.port)
        raise ConnectionError("no pod is ready")

    async def _refuse(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_REQUEST_HEAD_SECONDS):
            await client.readuntil(b"\r\n\r\n")
        refusal = self._explain()
        body = json.dumps(refusal.envelope()).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            f"Retry-After: {refusal.retry_after}\r\n"
            "Connection: close\r\n\r\n"
        )
        to_client.write(head.encode() + body)
        await to_client.drain()
        to_client.write_eof()
        async with asyncio.timeout(_REQUEST_HEAD_SECONDS):
            while await client.read(_CHUNK_BYTES):
                pass  # closing with unread bytes would reset the connection under the answer


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy until the end of one direction, and pass the end on."""
    while chunk := await source.read(_CHUNK_BYTES):
        target.write(chunk)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


async def _upload(client: asyncio.StreamReader, to_pod: asyncio.StreamWriter) -> None:
    """Copy what the caller sends. The connection outlives the end of it, but not an error: the caller is gone then."""
    await _pump(client, to_pod)
    await forever()
