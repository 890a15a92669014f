"""The front door leads to ready pods only, and passes on what either side does with the connection."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from paceline_operator.local.front import Address, FrontDoor, Refusal
from paceline_operator.local.served import why_not_ready

HOST = "127.0.0.1"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def pod(handler: Handler) -> AsyncIterator[Address]:
    server = await asyncio.start_server(handler, HOST, 0)
    async with server:
        yield Address(HOST, server.sockets[0].getsockname()[1])


@asynccontextmanager
async def door(*addresses: Address) -> AsyncIterator[int]:
    front = FrontDoor(lambda: addresses, lambda: Refusal("x is not ready: Loading"))
    try:
        yield await front.start(HOST, 0)
    finally:
        front.close()


async def says(text: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(text)
    await writer.drain()
    await reader.read()
    writer.close()


async def first_line(port: int) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"hello\n")
    line = await reader.readline()
    writer.close()
    return line


def closed_address() -> Address:
    """An address where nothing listens."""
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        return Address(HOST, unused.getsockname()[1])


async def test_without_a_ready_pod_the_caller_gets_a_503_in_openai_s_error_shape() -> None:
    async with door() as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabc")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: " in head
        assert json.loads(body)["error"]["message"] == "x is not ready: Loading"


async def test_a_pod_that_has_just_gone_is_passed_over_for_the_next() -> None:
    async with pod(lambda r, w: says(b"alive\n", r, w)) as alive, door(closed_address(), alive) as port:
        assert [await first_line(port) for _ in range(3)] == [b"alive\n"] * 3


async def test_new_connections_go_to_the_pod_with_the_fewest_open_ones() -> None:
    async with (
        pod(lambda r, w: says(b"one\n", r, w)) as one,
        pod(lambda r, w: says(b"two\n", r, w)) as two,
        door(one, two) as port,
    ):
        connections = [await asyncio.open_connection(HOST, port) for _ in range(4)]
        for _, writer in connections:
            writer.write(b"hello\n")
        lines = [await reader.readline() for reader, _ in connections]
        assert sorted(lines) == [b"one\n", b"one\n", b"two\n", b"two\n"]
        for _, writer in connections:
            writer.close()


async def test_a_caller_that_goes_away_is_gone_for_the_pod_too() -> None:
    gone = asyncio.Event()

    async def waits_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"token\n")
        await reader.read()
        gone.set()
        writer.close()

    async with pod(waits_for_the_end) as address, door(address) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"hello\n")
        assert await reader.readline() == b"token\n"
        writer.close()
        await asyncio.wait_for(gone.wait(), 60)


async def test_a_pod_that_dies_in_the_middle_ends_the_caller_s_connection() -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"half")
        await writer.drain()
        writer.transport.abort()

    async with pod(dies) as address, door(address) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"hello\n")
        assert await asyncio.wait_for(reader.read(), 60) in (b"half", b"")
        writer.close()


def test_a_request_in_the_moment_after_the_last_server_went_is_not_told_that_all_are_ready() -> None:
    """The condition is of the last look at the pods: it says Serving until the next one."""
    serving = {"status": "True", "reason": "Serving", "message": "1 of 1 replicas ready"}
    assert "1 of 1" not in why_not_ready(serving)
    assert why_not_ready({"status": "False", "reason": "Loading", "message": "it loads"}) == "Loading: it loads"
    assert why_not_ready({}) == "Starting: it starts"
