"""What is no request that HTTP or we know is refused in the shape of every other refusal."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from paceline_server.gateway import connection
from paceline_server.gateway.connection import GatewayRunner
from paceline_server.gateway.serve import serve_gateway
from paceline_server.testing import FakeEngine, server_config, write_model

BODY = b'{"model": "tiny", "prompt": "Hi", "max_tokens": 2}'
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    """The port of a gateway as `serve` runs it."""
    write_model(tmp_path, None)
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    engine = FakeEngine(tmp_path, [66])
    task = asyncio.create_task(serve_gateway(server_config(), engine, on_listening=listening.set_result))
    port = await listening
    while (await exchange(port, request(b"GET", b"/readyz", b"Host: x")))[0] != 200:
        await asyncio.sleep(0.01)
    yield port
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def request(method: bytes, path: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    return b"%s %s HTTP/1.1\r\n%s\r\n" % (method, path, b"".join(header + b"\r\n" for header in headers)) + body


def completion(*headers: bytes, body: bytes = BODY) -> bytes:
    return request(b"POST", b"/v1/completions", b"Host: x", *headers, body=body)


async def exchange(port: int, sent: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers in lower case, and the JSON of the answer to raw bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode().lower().split("\r\n")
        headers = dict(line.split(": ", maxsplit=1) for line in head[1:] if line)
        return int(head[0].split()[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))
    finally:
        writer.close()


LENGTH = b"Content-Length: %d" % len(BODY)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GARBAGE\r\n\r\n", "invalid method"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", "https"),
        (b"GET / HTTP/9.x\r\n\r\n", "version"),
        (completion(LENGTH, b"Transfer-Encoding: chunked"), "can't be present with"),
        (completion(b"Content-Length: -3"), "content-length"),
        (completion(b"Transfer-Encoding: gzip", body=b""), "transfer-encoding"),
        (request(b"GET", b"/healthz", b"Host: x", b"X: " + b"a" * 10_000), "more than 8190 bytes"),
        (request(b"GET", b"/" + b"a" * 10_000, b"Host: x"), "more than 8190 bytes"),
        (request(b"GET", b"/healthz", b"Host: x", *(b"X%d: a" % number for number in range(200))), "too many headers"),
        (request(b"GET", b"/healthz"), "missing 'host'"),
        (request(b"GET", b"/healthz", b"Host: x", b"no colon"), "invalid header"),
    ],
)
async def test_what_is_no_http_gets_the_error_envelope_and_one_line_in_the_log(
    sent: bytes, says: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.clear()
    status, headers, answer = await exchange(port, sent)
    error = answer["error"]
    assert (status, headers["content-type"]) == (400, "application/json; charset=utf-8")
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
    assert says in error["message"].lower()
    assert len(error["message"]) < 300
    (record,) = [record for record in caplog.records if record.name != "paceline.access"]
    assert (record.levelname, record.exc_info) == ("INFO", None)


async def test_a_client_that_goes_away_while_it_is_written_to_is_no_error_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    written = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.close()  # as when the client's end is read between two writes
        written.set()
        await response.write(b"more")
        return response

    app = web.Application()
    app.router.add_get("/", handler)
    runner = GatewayRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(request(b"GET", b"/", b"Host: x"))
        await written.wait()
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
    finally:
        await runner.cleanup()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_unknown_expectation_is_refused_by_name_and_the_known_one_is_met(port: int) -> None:
    status, _, answer = await exchange(port, completion(LENGTH, b"Expect: 200-ok"))
    assert (status, answer["error"]["type"]) == (417, "invalid_request_error")
    assert "200-ok" in answer["error"]["message"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(completion(LENGTH, b"Expect: 100-Continue", b"Connection: close", body=b""))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(BODY)
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize(
    ("headers", "body", "status", "says"),
    [
        ([b"Transfer-Encoding: gzip, chunked"], CHUNKED, 400, "'gzip'"),
        ([b"Transfer-Encoding: Chunked"], CHUNKED, 200, None),
        ([b"Content-Encoding: gzip", LENGTH], BODY, 400, "compressed"),
        ([b"Content-Encoding: IDENTITY", LENGTH], BODY, 200, None),
        ([b"Content-Encoding: identity", b"Content-Encoding: br", LENGTH], BODY, 400, "compressed"),
    ],
)
async def test_only_codings_that_change_nothing_are_taken(
    headers: list[bytes], body: bytes, status: int, says: str | None, port: int
) -> None:
    got, _, answer = await exchange(port, completion(*headers, body=body))
    assert got == status
    assert says is None or says in answer["error"]["message"]


async def test_a_write_waits_until_all_of_it_is_with_the_socket() -> None:
    """What a buffer of the process holds when a drain ends would never reach the client."""
    runner = GatewayRunner(web.Application())
    await runner.setup()
    ours, theirs = socket.socketpair()
    with theirs:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(runner.server, ours)
        assert transport.get_write_buffer_limits() == (0, 0)
        transport.close()
        await runner.cleanup()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_has_read_nothing_for_long_is_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch, *, streamed: bool
) -> None:
    monkeypatch.setattr(connection, "STALLED_SECONDS", 0.2)
    ended = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse() if streamed else web.Response(body=bytes(32 << 20))
        try:
            await response.prepare(request)
            while streamed:
                await response.write(bytes(1 << 20))
            await response.write_eof()
        finally:
            ended.set()
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    runner = GatewayRunner(app, handler_cancellation=True)
    await runner.setup()
    ours, theirs = socket.socketpair()
    with theirs:
        await asyncio.get_running_loop().connect_accepted_socket(runner.server, ours)
        theirs.send(request(b"GET", b"/", b"Host: x"))
        async with asyncio.timeout(60):
            await ended.wait()
        await runner.cleanup()


class SlowlyRead(asyncio.Transport):
    """Whatever is looked at, so much of an answer is left at its client."""

    def __init__(self, left: list[int]) -> None:
        super().__init__()
        self.left = left
        self.aborted = asyncio.Event()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.left.pop(0)

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        pass


async def test_a_client_that_reads_slowly_is_waited_for_as_long_as_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALLED_SECONDS", 0.0)
    runner = GatewayRunner(web.Application())
    await runner.setup()
    assert runner.server is not None
    transport, client = SlowlyRead([9, 8, 1, 1, 0]), runner.server()
    client.connection_made(transport)
    client.pause_writing()
    async with asyncio.timeout(60):
        await transport.aborted.wait()
    assert transport.left == [0]
    await runner.cleanup()
