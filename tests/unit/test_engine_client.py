"""The gateway's end of the wire, against real processes that run the real loop over a fake model."""

import asyncio
import logging
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from paceline_server.config import parse
from paceline_server.engine import child, restarts
from paceline_server.engine.client import EngineClient
from paceline_server.engine.interface import FinishReason, GenerationRequest
from paceline_server.engine.status import StartupPhase
from paceline_server.engine.testing import expected_tokens, model_info
from paceline_server.engine.wire import Ready
from paceline_server.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineLost,
    EngineUnavailable,
    InvalidConfiguration,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from paceline_server.simulator.trace import read

LOOP = """
import os, socket, sys, time
from paceline_server.engine.status import StartupPhase
from paceline_server.engine.loop import Loaded, Wire, run
from paceline_server.engine.testing import FakeRunner, model_info
from paceline_server.errors import ModelNotFound

class SlowRunner(FakeRunner):
    def execute(self, batch):
        time.sleep(0.005)
        return super().execute(batch)

def load(config, on_phase):
    on_phase(StartupPhase("load_weights"))
    {load}
    on_phase(StartupPhase("load_weights", 0.1))
    info = model_info(num_blocks=256, max_model_len=1000)
    return Loaded(SlowRunner(info), info)

sys.exit(run(Wire(socket.socket(fileno=int(sys.argv[1]))), load))
"""


@asynccontextmanager
async def running_client(load="pass", **groups):
    client = EngineClient(
        parse({"engine": {"model_path": "fake"}, **groups}), (sys.executable, "-c", LOOP.replace("{load}", load))
    )
    supervisor = asyncio.create_task(client.supervise())
    try:
        yield client, supervisor
    finally:
        supervisor.cancel()
        with suppress(asyncio.CancelledError, EngineFailed, InvalidConfiguration, ModelNotFound):
            await supervisor


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def request(name="r", prompt=(1, 2, 3), max_tokens=5):
    return GenerationRequest(name, prompt, max_tokens, ignore_eos=True)


async def collect(client, wanted):
    async with client.stream(wanted) as outputs:
        return [token async for output in outputs for token in output.token_ids]


async def test_streams_run_together_and_each_gets_its_own_tokens():
    async with running_client() as (client, _):
        await until(lambda: client.status.ready)
        prompts = [(1,), (2, 3), tuple(range(1, 30))]
        results = await asyncio.gather(*(collect(client, request(str(p), p, 6)) for p in prompts))
        assert results == [expected_tokens(prompt, 6) for prompt in prompts]
        assert [phase.name for phase in client.status.phases] == ["start_engine", "load_weights"]
        assert all(phase.seconds is not None for phase in client.status.phases)


@pytest.mark.parametrize("batching", [{"enable_continuous_batching": False}, {"batcher": "static", "packed": False}])
async def test_batches_by_request_give_the_same_tokens_over_the_wire(batching):
    async with running_client(batching={"max_queue_delay_us": 2000, **batching}) as (client, _):
        await until(lambda: client.status.ready)
        prompts = [(1,), (2, 3), tuple(range(1, 30))]
        results = await asyncio.gather(*(collect(client, request(str(p), p, 6)) for p in prompts))
        assert results == [expected_tokens(prompt, 6) for prompt in prompts]
        with pytest.raises(InvalidRequest, match="max_tokens_in_batch"):
            await collect(client, request("long", tuple(range(600))))


async def test_before_the_engine_is_ready_a_request_is_refused_with_a_time_to_retry():
    async with running_client(load="time.sleep(30)") as (client, _):
        await until(lambda: client.status.phase == "load_weights")
        with pytest.raises(EngineUnavailable) as refusal:
            await collect(client, request())
        assert refusal.value.retry_after > 0
        assert client.status.reason == "Loading"


async def test_leaving_the_stream_frees_its_blocks():
    async with running_client() as (client, _):
        await until(lambda: client.status.ready)
        async with client.stream(request("long", (1, 2), 900)) as outputs:
            await anext(outputs)
            await until(lambda: client.stats.running == 1)
        await until(lambda: client.stats.running == 0 and client.stats.kv_usage == 0)


async def test_a_killed_engine_ends_its_streams_with_an_error_and_comes_back():
    async with running_client() as (client, _):
        await until(lambda: client.status.ready)
        async with client.stream(request("long", (1, 2), 900)) as outputs:
            await anext(outputs)
            os.kill(client._process.pid, signal.SIGKILL)
            with pytest.raises(EngineLost):
                async for _ in outputs:
                    pass
            assert not client.status.ready
            assert client.status.reason == "EngineRestarting"
        await until(lambda: client.status.ready)
        assert client.restarts == 1
        assert await collect(client, request()) == expected_tokens((1, 2, 3), 5)


HANGS_AT_ITS_END = "SlowRunner.execute = lambda *_: (os.close(int(sys.argv[1])), time.sleep(600))"


async def test_an_engine_that_hangs_while_it_ends_loses_its_requests_at_once(monkeypatch):
    monkeypatch.setattr(child, "_EXIT_SECONDS", 600.0)
    async with running_client(load=HANGS_AT_ITS_END) as (client, _):
        await until(lambda: client.status.ready)
        async with asyncio.timeout(60):
            with pytest.raises(EngineLost):
                await collect(client, request())
        assert client.status.reason == "EngineRestarting"
        with pytest.raises(EngineUnavailable):
            await collect(client, request())
        os.kill(client._process.pid, 0)


async def test_an_engine_that_hangs_while_it_ends_is_killed():
    async with running_client(load=HANGS_AT_ITS_END) as (client, _):
        await until(lambda: client.status.ready)
        pid = client._process.pid
        with pytest.raises(EngineLost):
            await collect(client, request())
        await until(lambda: client.restarts == 1)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_an_engine_that_hangs_while_it_starts_again_is_killed_and_started_once_more(monkeypatch, tmp_path):
    monkeypatch.setattr(restarts, "_LEAST_BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(restarts, "_BACKOFF_SECONDS", 0.0)
    lives = tmp_path / "lives"
    hangs = f"open({str(lives)!r}, 'a').write('x'); os.path.getsize({str(lives)!r}) == 2 and time.sleep(600)"
    async with running_client(load=hangs) as (client, _):
        await until(lambda: client.status.ready)
        client._process.kill()
        await until(lambda: client.restarts >= 2 and client.status.ready)
        assert await collect(client, request())


async def test_an_engine_that_requests_kill_again_and_again_ends_the_supervisor(monkeypatch):
    monkeypatch.setattr(restarts, "_MAX_SHORT_LIVES", 2)
    monkeypatch.setattr(restarts, "_BACKOFF_SECONDS", 0.0)
    async with running_client(load="SlowRunner.execute = lambda *_: os._exit(7)") as (client, supervisor):
        for _ in range(2):
            await until(lambda: client.status.ready)
            with pytest.raises(EngineLost):
                await collect(client, request())
        async with asyncio.timeout(60):  # or it would be started again without end
            with pytest.raises(EngineFailed, match=r"2 times in a row .* exit code 7"):
                await supervisor


async def test_a_start_that_fails_ends_the_supervisor_with_the_engines_own_reason():
    async with running_client(load="raise ModelNotFound('no such model')") as (_, supervisor):
        with pytest.raises(ModelNotFound, match="no such model"):
            await supervisor


async def test_an_error_that_nobody_foresaw_is_told_with_its_text():
    async with running_client(load="raise ZeroDivisionError('heads')") as (_, supervisor):
        with pytest.raises(EngineFailed, match="ZeroDivisionError while loading the model: heads"):
            await supervisor


async def test_a_process_that_dies_while_starting_is_named_by_its_end():
    async with running_client(load="os.kill(os.getpid(), 9)") as (_, supervisor):
        with pytest.raises(EngineFailed, match="SIGKILL"):
            await supervisor


async def test_a_request_that_the_engine_refuses_fails_alone():
    async with running_client() as (client, _):
        await until(lambda: client.status.ready)
        with pytest.raises(InvalidRequest, match="5000 tokens"):
            await collect(client, request("huge", tuple([1] * 5000)))
        assert await collect(client, request()) == expected_tokens((1, 2, 3), 5)


async def test_a_request_without_time_to_start_is_told_so_and_one_that_ran_keeps_what_it_got():
    async with running_client() as (client, _):
        await until(lambda: client.status.ready)
        with pytest.raises(DeadlineExceeded):
            await collect(client, replace(request("never"), timeout=0.0))
        async with client.stream(replace(request("cut", (1, 2), 900), timeout=0.2)) as outputs:
            got = [output async for output in outputs]
        assert got[-1].finish is FinishReason.TIMEOUT
        tokens = [token for output in got for token in output.token_ids]
        assert tokens == expected_tokens((1, 2), len(tokens))
        assert 0 < len(tokens) < 900


async def test_a_request_that_would_be_too_late_is_refused_with_a_time_to_retry():
    async with running_client() as (client, _):
        await until(lambda: client.status.ready)
        await collect(client, request("warm", (1,) * 40, 10))
        with pytest.raises(Overloaded) as refusal:
            await collect(client, replace(request("hurried"), timeout=1e-4))
        assert refusal.value.retry_after > 0


async def test_the_process_ends_with_its_supervisor():
    async with running_client() as (client, _):
        await until(lambda: client.status.ready)
        pid = client._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_request_for_several_answers_streams_them_all_and_one_can_be_cut():
    async with running_client() as (client, _):
        await until(lambda: client.status.ready)
        wanted = replace(request("r", (1, 2, 3), 6), n=3)
        tokens = {index: [] for index in range(3)}
        async with client.stream(wanted) as outputs:
            async for output in outputs:
                tokens[output.index] += output.token_ids
        assert tokens == {index: expected_tokens((1, 2, 3), 6) for index in range(3)}

        async with client.stream(replace(request("s", (1, 2), 300), n=3)) as outputs:
            await anext(outputs)
            await until(lambda: client.stats.running == 3)
            client.cut("s", 1)
            client.cut("s", 1)
            await until(lambda: client.stats.running == 2)
        await until(lambda: client.stats.running == 0 and client.stats.kv_usage == 0)


def test_what_was_loaded_is_logged_in_words(caplog):
    caplog.set_level(logging.INFO)
    client = EngineClient(parse({"engine": {"model_path": "fake", "quantization": "int8"}}))
    client._note(StartupPhase("start_engine", 1.0))
    client._receive(Ready(model_info(num_blocks=256, block_size=16)), begun=0.0)
    (line,) = (record.getMessage() for record in caplog.records if "ready" in record.getMessage())
    assert "a KV cache of 4096 tokens" in line
    assert "quantized to int8" in line
    assert "ModelInfo" not in line


async def test_an_engine_that_is_told_to_writes_a_trace_of_what_it_is_asked(tmp_path):
    path = tmp_path / "trace.jsonl"
    async with running_client(observability={"trace_path": str(path)}) as (client, _):
        await until(lambda: client.status.ready)
        async with client.stream(request("a", max_tokens=4)) as stream:
            async for _ in stream:
                pass
        await until(lambda: path.exists() and path.read_text())
    [line] = read(path)
    assert (line.prompt_tokens, line.output_tokens) == (3, 4)


async def test_a_trace_that_cannot_be_written_ends_the_start_by_name(tmp_path):
    path = tmp_path / "nowhere" / "trace.jsonl"
    async with running_client(observability={"trace_path": str(path)}) as (_, supervisor):
        with pytest.raises(InvalidConfiguration, match="trace_path"):
            await supervisor
