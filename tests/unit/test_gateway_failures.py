"""Nothing that goes wrong looks like a complete answer, and nobody's work goes on for a client that has left."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from paceline_server.engine.interface import EmbeddingOutput, EmbeddingRequest, Task
from paceline_server.engine.status import EngineStats
from paceline_server.errors import EngineLost, NotLocal
from paceline_server.gateway.app import create_app
from paceline_server.gateway.health import drain
from paceline_server.gateway.state import GATEWAY
from paceline_server.testing import FakeEngine, Served, served, server_config

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
ENDPOINTS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
both_endpoints = pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["chat", "completions"])
LOST = EngineLost("the engine process died")
A = 66
"""A token with text."""


def frames(body: bytes) -> list[Any]:
    """The data frames of a stream; [DONE] as a string."""
    *parts, rest = body.decode().split("\n\n")
    assert rest == ""
    return [part.removeprefix("data: ") if part.endswith("[DONE]") else json.loads(part[6:]) for part in parts]


def outcomes(server: Served) -> dict[str, float]:
    """The counted outcomes that are not zero."""
    names = {name: value for name, value in server.scrape().items() if name.startswith("paceline_requests_total")}
    return {name.split('"')[1]: value for name, value in names.items() if value}


@both_endpoints
async def test_an_engine_lost_in_mid_stream_ends_it_with_an_error_and_without_done(
    folder: Path, path: str, body: dict[str, Any]
) -> None:
    async with served(FakeEngine(folder, [A, A, LOST])) as server:
        response = await server.client.post(
            path, json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        *chunks, last = frames(await response.read())
        assert outcomes(server) == {"failed": 1}
    assert response.status == 200
    assert last == {"error": {"message": str(LOST), "type": "server_error", "param": None, "code": None}}
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


@both_endpoints
async def test_an_engine_lost_before_the_answer_is_a_500(folder: Path, path: str, body: dict[str, Any]) -> None:
    """Whole, and streamed when nothing has been sent yet."""
    async with served(FakeEngine(folder, [LOST])) as server:
        for streamed in (False, True):
            response = await server.client.post(path, json={**body, "stream": streamed})
            assert response.status == 500
            assert (await response.json())["error"]["type"] == "server_error"


async def test_a_fault_of_ours_in_mid_stream_is_an_error_frame_too(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its traceback is in the log, and not in the answer."""
    async with served(FakeEngine(folder, [A, ZeroDivisionError("secret detail")])) as server:
        response = await server.client.post("/v1/completions", json={**COMPLETION, "stream": True})
        last = frames(await response.read())[-1]
        whole = await server.client.post("/v1/completions", json=COMPLETION)
        assert (whole.status, await whole.json()) == (500, last)
        assert (await server.client.get("/healthz")).status == 200
    assert "secret" not in last["error"]["message"]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("script", [[], [A]], ids=["queued", "running"])
async def test_a_client_that_goes_away_aborts_its_request(folder: Path, streamed: bool, script: list[int]) -> None:
    """While it waits for its first token and later, streamed and whole."""
    engine = FakeEngine(folder, [*script, asyncio.Event()])
    async with served(engine) as server:
        answer = asyncio.create_task(server.client.post("/v1/completions", json={**COMPLETION, "stream": streamed}))
        await engine.until(lambda engine: len(engine.running) == 1 and engine.outputs == len(script))
        if streamed and script:
            (await answer).close()  # its head has come
        else:
            answer.cancel()
        await engine.until(lambda engine: not engine.running)
        assert len(engine.aborted) == 1
        server.gateway.drain.begin()
        await server.gateway.drain.finished()
        assert outcomes(server) == {"cancelled": 1}
        assert server.scrape()["paceline_cancellations_total"] == 1
        assert server.gateway.backpressure.waiting == 0


async def test_a_client_that_reads_nothing_holds_the_request_back(folder: Path) -> None:
    """The engine's outputs are not taken once the socket's buffers are full: nothing piles up in the gateway."""
    engine = FakeEngine(folder, lambda request: [A] * 200_000, max_model_len=1_000_000, num_blocks=100_000)
    async with served(engine) as server:
        reader, writer = await asyncio.open_connection(*_address(server), limit=1024)
        _send(writer, {**COMPLETION, "stream": True})
        await reader.readuntil(b"data: ")
        taken = -1
        while taken != engine.outputs:  # until a while passes without progress
            taken = engine.outputs
            await asyncio.sleep(0.2)
        assert 0 < taken < 100_000
        writer.transport.abort()
        await engine.until(lambda engine: not engine.running)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(folder: Path) -> None:
    engine = FakeEngine(folder, [A], stats=EngineStats(waiting=3, running=64))
    async with served(engine, backpressure={"max_queued_requests": 3}) as server:
        response = await server.client.post("/v1/chat/completions", json=CHAT)
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"] | {"message": ""} == {
            "message": "", "type": "overloaded_error", "param": None, "code": "queue_full",
        }  # fmt: skip
        assert server.scrape()['paceline_rejections_total{reason="overloaded"}'] == 1
        engine.stats = EngineStats(waiting=2, running=64)
        assert (await server.client.post("/v1/chat/completions", json=CHAT)).status == 200


async def test_an_operator_may_want_429_for_overload(folder: Path) -> None:
    engine = FakeEngine(folder, [A], stats=EngineStats(waiting=1, running=64))
    async with served(engine, backpressure={"max_queued_requests": 1, "overload_status": 429}) as server:
        response = await server.client.post("/v1/completions", json=COMPLETION)
        assert (response.status, "Retry-After" in response.headers) == (429, True)


async def test_requests_beyond_the_queue_are_refused_while_those_before_wait(folder: Path) -> None:
    """One runs, two wait, the fourth is refused: counted by the gateway before the engine reports anything."""
    gate = asyncio.Event()
    engine = FakeEngine(folder, [gate, A])
    async with served(engine, backpressure={"max_queued_requests": 2}) as server:
        server.gateway.backpressure._max_running = 1
        posts = [asyncio.create_task(server.client.post("/v1/completions", json=COMPLETION)) for _ in range(3)]
        await engine.until(lambda engine: len(engine.running) == 3)
        assert (await server.client.post("/v1/completions", json=COMPLETION)).status == 503
        gate.set()
        assert [(await post).status for post in posts] == [200] * 3
        assert server.gateway.backpressure.waiting == 0


async def test_a_head_without_its_body_has_no_place_in_the_queue(folder: Path) -> None:
    """Connections that never send what they announce must not fill it for others."""
    engine = FakeEngine(folder, [A], stats=EngineStats(running=64))
    async with served(engine, backpressure={"max_queued_requests": 1}) as server:
        _, writer = await asyncio.open_connection(*_address(server))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        while server.gateway.drain.running == 0:
            await asyncio.sleep(0.01)
        assert (await server.client.post("/v1/completions", json=COMPLETION)).status == 200
        writer.close()


async def test_nothing_is_served_before_the_engine_is_ready(folder: Path) -> None:
    engine = FakeEngine(folder, [A])
    async with served(engine) as server:
        engine.ready = False
        for method, path in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
            response = await server.client.request(method, path, json=COMPLETION)
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        engine.ready = True
        assert (await server.client.post("/v1/completions", json=COMPLETION)).status == 200


async def test_draining_finishes_what_runs_and_refuses_what_comes(folder: Path) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(folder, [A, gate, A])
    async with served(engine) as server:
        running = await server.client.post("/v1/completions", json={**COMPLETION, "stream": True})
        drained = await server.client.post("/drain")
        assert (drained.status, await drained.json()) == (202, {"draining": True, "running": 1})
        for path, body in ENDPOINTS:
            refused = await server.client.post(path, json=body)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert refused.headers["Connection"] == "close"
        ready = await server.client.get("/readyz")
        assert (ready.status, (await ready.json())["reason"]) == (503, "Draining")
        assert (await server.client.get("/healthz")).status == 200
        finished = asyncio.create_task(server.gateway.drain.finished())
        await asyncio.sleep(0)
        assert not finished.done()
        gate.set()
        assert frames(await running.read())[-1] == "[DONE]"
        await finished
        assert server.scrape()['paceline_rejections_total{reason="draining"}'] == 2


async def test_an_answer_cut_by_the_drains_deadline_ends_with_an_error(folder: Path) -> None:
    engine = FakeEngine(folder, [A, asyncio.Event()])
    async with served(engine, drain_seconds=0.05) as server:
        running = await server.client.post("/v1/completions", json={**COMPLETION, "stream": True})
        await server.client.post("/drain")
        last = frames(await running.read())[-1]
        assert "shuts down" in last["error"]["message"]
        await server.gateway.drain.finished()
        assert len(engine.aborted) == 1


class WideEngine(FakeEngine):
    """Its vectors are long: an answer of megabytes does not fit the buffers of a connection."""

    async def embed(self, request: EmbeddingRequest) -> EmbeddingOutput:
        output = await super().embed(request)
        return replace(output, vectors=[vector * 300_000 for vector in output.vectors or ()])


@asynccontextmanager
async def half_read(server: Served) -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A client that has read no more than the head of a whole answer, and the bytes that are to follow."""
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # bounds the server's buffer as well
        await asyncio.get_running_loop().sock_connect(client, _address(server))
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        _send(writer, {"model": "tiny", "input": "Hi"}, "/v1/embeddings")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert "x-request-id" in head
        try:
            yield reader, int(head.split("Content-Length: ")[1].split()[0])
        finally:
            writer.close()


async def test_draining_waits_for_a_whole_answer_until_its_client_has_read_it(folder: Path) -> None:
    async with served(WideEngine(folder, task=Task.EMBED)) as server, half_read(server) as (reader, size):
        server.gateway.drain.begin()
        assert server.gateway.drain.running == 1
        assert json.loads(await reader.readexactly(size))["object"] == "list"
        await server.gateway.drain.finished()
        assert outcomes(server) == {"completed": 1}


async def test_a_whole_answer_that_is_not_read_by_the_drains_deadline_ends_with_its_connection(folder: Path) -> None:
    """Not with an error that a client would take for a part of it."""
    engine = WideEngine(folder, task=Task.EMBED)
    async with served(engine, drain_seconds=0.05) as server, half_read(server) as (reader, size):
        server.gateway.drain.begin()
        await server.gateway.drain.finished()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(size)


async def test_an_idle_server_is_drained_at_once(folder: Path) -> None:
    async with served(FakeEngine(folder)) as server:
        await server.client.post("/drain")
        await server.client.post("/drain")
        await server.gateway.drain.finished()


LOCAL = ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"]
REMOTE = ["10.0.0.7", "::ffff:10.0.0.7", "fe80::1%eth0"]


@pytest.mark.parametrize(("peer", "admitted"), [*((one, True) for one in LOCAL), *((one, False) for one in REMOTE)])
async def test_only_a_process_of_the_servers_own_host_can_drain_it(folder: Path, peer: str, *, admitted: bool) -> None:
    """Whoever reaches a Service could otherwise end its replicas, one after the other."""
    app = create_app(server_config(), FakeEngine(folder))
    request = make_mocked_request("POST", "/drain", app=app).clone(remote=peer)
    if admitted:
        assert (await drain(request)).status == 202
    else:
        with pytest.raises(NotLocal) as refused:
            await drain(request)
        assert (refused.value.status, refused.value.code) == (403, "local_only")
    assert app[GATEWAY].drain.begun is admitted


def _address(server: Served) -> tuple[str, int]:
    url = server.client.make_url("/")
    assert url.host is not None
    assert url.port is not None
    return url.host, url.port


def _send(writer: asyncio.StreamWriter, body: dict[str, Any], path: str = "/v1/completions") -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
