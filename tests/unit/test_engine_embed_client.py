"""Embeddings over the wire, against a real process that runs the real loop over a fake encoder."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress

import pytest

from paceline_server.config import parse
from paceline_server.engine.client import EngineClient
from paceline_server.engine.interface import EmbeddingRequest, Task
from paceline_server.engine.testing import fake_vector
from paceline_server.errors import DeadlineExceeded, EngineFailed, EngineLost, EngineUnavailable, InvalidRequest

LOOP = """
import os, socket, sys, time
from dataclasses import replace
from paceline_server.engine.interface import Task
from paceline_server.engine.loop import LoadedEncoder, Wire, run
from paceline_server.engine.testing import FakeEncoder, model_info

class SlowEncoder(FakeEncoder):
    def encode(self, texts):
        time.sleep(0.05)
        return super().encode(texts)

def load(config, on_phase):
    return LoadedEncoder(SlowEncoder(), replace(model_info(max_model_len=16), task=Task.EMBED, dimensions=2))

sys.exit(run(Wire(socket.socket(fileno=int(sys.argv[1]))), load))
"""


@asynccontextmanager
async def running_client(**batching):
    config = parse({"engine": {"model_path": "fake"}, "batching": batching})
    client = EngineClient(config, (sys.executable, "-c", LOOP))
    supervisor = asyncio.create_task(client.supervise())
    try:
        await until(lambda: client.status.ready)
        yield client
    finally:
        supervisor.cancel()
        with suppress(asyncio.CancelledError, EngineFailed):
            await supervisor


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_requests_run_together_and_each_gets_its_own_vectors():
    async with running_client(max_queue_delay_us=1000) as client:
        assert (client.info.task, client.info.dimensions) == (Task.EMBED, 2)
        requests = [EmbeddingRequest(str(n), [[n + 1] * (k + 1) for k in range(n + 1)]) for n in range(5)]
        answers = await asyncio.gather(*(client.embed(request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert list(answer.vectors) == [fake_vector(text) for text in request.inputs]


async def test_a_request_that_is_cancelled_leaves_the_engine():
    async with running_client(max_batch_size=1, max_tokens_in_batch=16) as client:
        task = asyncio.create_task(client.embed(EmbeddingRequest("long", [[1]] * 200)))
        await until(lambda: client.stats.running == 1)
        task.cancel()
        await until(lambda: client.stats.running == client.stats.waiting_tokens == 0)
        assert client.stats.steps < 200


async def test_what_the_engine_refuses_and_what_is_too_late_become_errors_of_the_request():
    async with running_client(max_batch_size=1, max_tokens_in_batch=8) as client:
        with pytest.raises(InvalidRequest, match="max_tokens_in_batch"):
            await client.embed(EmbeddingRequest("long", [[1] * 9]))
        with pytest.raises(DeadlineExceeded):
            await client.embed(EmbeddingRequest("late", [[1]] * 50, timeout=0.2))


async def test_a_killed_engine_ends_its_requests_with_an_error_and_comes_back():
    async with running_client(max_batch_size=1, max_tokens_in_batch=16) as client:
        task = asyncio.create_task(client.embed(EmbeddingRequest("a", [[1]] * 100)))
        await until(lambda: client.stats.running == 1)
        os.kill(client._process.pid, signal.SIGKILL)
        with pytest.raises(EngineLost):
            await task
        with pytest.raises(EngineUnavailable):
            await client.embed(EmbeddingRequest("b", [[1]]))
        await until(lambda: client.status.ready)
        assert (await client.embed(EmbeddingRequest("c", [[1]]))).vectors
