"""`paceline up` from its first line to its last: start-up, prompt, drain by Ctrl-C, and what stands in its way."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from paceline_operator import names
from paceline_operator.cluster import Key, Manifest
from paceline_operator.local import columns, front
from paceline_operator.local.errors import AddressInUse, AlreadyRunning, StartFailed
from paceline_operator.local.state import Snapshot, StateFolder
from paceline_operator.local.testing import fake_service
from paceline_operator.local.up import UpOptions, up

KEY = Key("default", "fake")


class Terminal:
    """One `paceline up` under test."""

    def __init__(self, folder: Path) -> None:
        self.environment: Mapping[str, str] = {**os.environ, "XDG_STATE_HOME": str(folder), "HOME": str(folder)}
        self.folder = folder
        self.output = io.StringIO()
        self.state = StateFolder.of(KEY, self.environment)

    async def up(self, service: Manifest, **options: Any) -> int:
        """Run it to its end; port 0 unless told otherwise."""
        file = self.folder / "service.yaml"
        file.write_text(yaml.safe_dump(service))
        return await up(UpOptions(file, **{"port": 0, **options}), self.output, self.environment)

    async def until(self, condition: Callable[[Snapshot], object]) -> Snapshot:
        """Wait for the published snapshot to satisfy a condition."""
        async with asyncio.timeout(60):
            while not ((snapshot := self.state.read()) and condition(snapshot)):
                await asyncio.sleep(0.02)
            return snapshot

    @asynccontextmanager
    async def running(self, service: Manifest, **options: Any) -> AsyncIterator[asyncio.Task[int]]:
        """Have it run meanwhile; it is ended as by Ctrl-C when the test has not done so."""
        task = asyncio.create_task(self.up(service, **options))
        try:
            yield task
        finally:
            if not task.done():
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.wait_for(task, 60)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal, after whose test no server may be left."""
    yield Terminal(tmp_path)
    assert not servers_of(tmp_path)


def servers_of(folder: Path) -> list[str]:
    """Command lines of processes that were started with a file below the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(folder) in line]


def has_failed(snapshot: Snapshot) -> bool:
    """Whether the server has ended with the status that says that restarts are useless."""
    last = (pod["status"]["containerStatuses"][0]["lastState"] for pod in snapshot.pods)
    return any(state.get("terminated", {}).get("exitCode") == names.EXIT_CONFIG for state in last)


def is_ready(snapshot: Snapshot) -> bool:
    conditions = snapshot.service["status"].get("conditions", ())
    return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)


def ask(session: aiohttp.ClientSession, url: str, tokens: int = 100) -> Any:
    return session.post(f"{url}/v1/chat/completions", json={"max_tokens": tokens})


async def test_a_prompt_is_answered_with_its_numbers_and_the_table_and_everything_has_ended(terminal: Terminal) -> None:
    assert await terminal.up(fake_service(), prompt="Name the capital city of France.") == 0
    lines = terminal.output.getvalue().splitlines()
    text = "\n".join(lines)
    for label in ("start server", "start engine", "load weights", "allocate KV cache", "warm up"):
        assert sum(label in line and "✓" in line for line in lines) == 1
    assert "The capital of France is Paris." in text
    assert "TTFT " in text
    assert "tokens/s" in text
    heading = next(line for line in lines if line.startswith("NAME"))
    assert heading.split() == ["NAME", "MODEL", "READY", "REPLICAS", "QUEUE", "TTFT-P95", "URL", "REASON", "AGE"]
    row = lines[lines.index(heading) + 1].split()
    assert row[:5] == ["fake", "hf://fake/Model", "True", "1/1", "0"]
    assert float(row[5]) > 0
    assert terminal.state.holder() is None


async def test_a_prompt_for_a_model_that_does_not_exist_fails_with_the_reason(terminal: Terminal) -> None:
    with pytest.raises(StartFailed, match=r"ModelNotFound: .*hf://fake/missing is neither"):
        await terminal.up(fake_service(model="hf://fake/missing"), prompt="x")
    for words in ("✗", "restarted", "ModelNotFound"):
        assert words not in terminal.output.getvalue()  # the error says it, once


@pytest.mark.parametrize("code", ["InvalidConfiguration", "ModelUnsupported"])
async def test_a_start_that_no_restart_can_mend_ends_paceline_up_in_the_foreground_too(
    terminal: Terminal, code: str
) -> None:
    failing = {"FAKE_FAILURE": f"{code}: not like this", "FAKE_EXIT_CODE": "78"}
    with pytest.raises(StartFailed, match=rf"^fake does not start: {code}: pod \S+ not like this\n`.*logs fake`"):
        await terminal.up(fake_service(environment=failing))
    assert "✗" not in terminal.output.getvalue()
    assert terminal.state.holder() is None


async def test_a_service_that_was_ready_once_is_restarted_however_it_ends(terminal: Terminal) -> None:
    fails = terminal.folder / "fails"
    failing = {"FAKE_FAILURE": "NoGPU: gone", "FAKE_EXIT_CODE": "78", "FAKE_FAILURE_FILE": fails.name}
    async with terminal.running(fake_service(environment=failing)) as task, aiohttp.ClientSession() as client:
        snapshot = await terminal.until(lambda _: "\nReady: " in terminal.output.getvalue())
        fails.touch()  # not before `up` itself has seen it ready: until then, such an end is one of the start
        with contextlib.suppress(aiohttp.ClientError):
            await client.post(f"{snapshot.url}/fake/crash")
        await terminal.until(has_failed)
        fails.unlink()
        await terminal.until(lambda _: terminal.output.getvalue().count("\nReady: ") == 2)
        assert not task.done()
    lines = terminal.output.getvalue().splitlines()
    assert any("✗ NoGPU: " in line for line in lines)
    starts = [line for line in lines if "✓ warm up" in line]
    assert len(starts) == 2, "the phases of a start are told once"


async def test_a_server_that_keeps_ending_without_a_reason_fails_the_prompt_with_its_last_words(
    terminal: Terminal,
) -> None:
    crash = {"FAKE_FAILURE": "IndexError: list index out of range"}
    with pytest.raises(StartFailed, match=r"list index out of range"):
        await terminal.up(fake_service(environment=crash), prompt="x")
    assert "restarted (1)" in terminal.output.getvalue()


async def test_a_gpu_that_is_not_there_ends_the_prompt_and_says_what_to_do(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline_operator.local.machine._gpus", lambda: ())
    with pytest.raises(StartFailed, match=r"--cpu[^\n]*$"):  # nothing has run, so there is no log to point to
        await terminal.up(fake_service(resources={"limits": {"nvidia.com/gpu": "1"}}), prompt="x")


async def test_ctrl_c_finishes_running_streams_and_ends_with_0(terminal: Terminal) -> None:
    service = fake_service(environment={"FAKE_TOKENS": "20", "FAKE_TOKEN_SECONDS": "0.05"})
    async with terminal.running(service) as task, aiohttp.ClientSession() as client:
        snapshot = await terminal.until(is_ready)
        async with ask(client, snapshot.url) as answer:
            await answer.content.readline()
            os.kill(os.getpid(), signal.SIGINT)
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
        assert await task == 0
        assert terminal.state.read() is None
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(client, snapshot.url)


async def test_what_comes_during_a_drain_gets_a_503_until_the_last_stream_has_ended(terminal: Terminal) -> None:
    service = fake_service(environment={"FAKE_TOKENS": "1000", "FAKE_TOKEN_SECONDS": "0.5"}, drainSeconds=600)
    async with terminal.running(service) as task, aiohttp.ClientSession() as client:
        snapshot = await terminal.until(is_ready)
        async with ask(client, snapshot.url, tokens=1000) as answer:
            await answer.content.readline()
            os.kill(os.getpid(), signal.SIGTERM)
            draining = await terminal.until(lambda found: not is_ready(found))
            assert "Serving" not in columns.table([draining.service], datetime.now(UTC))
            assert "Draining" in columns.table([draining.service], datetime.now(UTC))
            async with ask(client, snapshot.url) as refusal:
                assert (refusal.status, refusal.headers["Retry-After"]) == (503, "1")
                assert await refusal.json() == front.DRAINING.envelope()
            assert not task.done()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(task, 60)
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(client, snapshot.url)


async def test_a_second_ctrl_c_ends_every_server_at_once(terminal: Terminal) -> None:
    service = fake_service(environment={"FAKE_TOKENS": "1000", "FAKE_TOKEN_SECONDS": "0.5"}, drainSeconds=600)
    async with terminal.running(service) as task, aiohttp.ClientSession() as client:
        snapshot = await terminal.until(is_ready)
        async with ask(client, snapshot.url, tokens=1000) as answer:
            await answer.content.readline()
            os.kill(os.getpid(), signal.SIGINT)
            while "draining" not in terminal.output.getvalue():
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(task, 60) == 130


async def test_the_front_door_says_503_with_the_reason_until_the_service_is_ready(terminal: Terminal) -> None:
    async with (
        terminal.running(fake_service(environment={"FAKE_PHASE_SECONDS": "0.3"})),
        aiohttp.ClientSession() as client,
    ):
        snapshot = await terminal.until(lambda found: not is_ready(found))
        async with ask(client, snapshot.url) as answer:
            assert answer.status == 503
            assert "fake is not ready" in (await answer.json())["error"]["message"]
        await terminal.until(is_ready)
        async with ask(client, snapshot.url) as answer:
            assert answer.status == 200


async def test_nothing_is_started_when_the_port_is_taken(terminal: Terminal) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port} .*: stop what is there, or choose .* with --port N"):
            await terminal.up(fake_service(), port=port)
    assert not terminal.state.pods.exists()


async def test_a_port_that_another_service_of_ours_has_is_told_with_its_name_and_what_stops_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PORT_OPTION", "PORT=N")
    async with terminal.running(fake_service()):
        snapshot = await terminal.until(lambda found: found.url)
        with pytest.raises(AddressInUse) as refused:
            await Terminal(terminal.folder).up(fake_service("other"), port=int(snapshot.url.rpartition(":")[2]))
    assert str(refused.value).endswith(
        "the LLMService fake is up there: stop it with `paceline down fake`, or choose another with PORT=N"
    )


async def test_an_address_that_is_not_this_machine_s_is_not_told_as_taken(terminal: Terminal) -> None:
    with pytest.raises(AddressInUse) as refused:
        await terminal.up(fake_service(), host="192.0.2.1")
    assert str(refused.value).endswith("choose an address of this machine with --host")


async def test_a_service_that_is_up_already_is_asked_and_left_as_it_is(terminal: Terminal) -> None:
    async with terminal.running(fake_service()) as task:
        await terminal.until(is_ready)
        second = Terminal(terminal.folder)
        with pytest.raises(AlreadyRunning, match="paceline down fake"):
            await second.up(fake_service())
        with pytest.raises(AlreadyRunning, match="another spec"):
            await second.up(fake_service(drainSeconds=7), prompt="x")
        assert await second.up(fake_service(), prompt="x") == 0
        assert "The capital of France is Paris." in second.output.getvalue()
        assert not task.done()


async def test_load_scales_the_service_up_behind_the_same_url(terminal: Terminal) -> None:
    service = fake_service(
        environment={"FAKE_TOKENS": "1000", "FAKE_TOKEN_SECONDS": "0.05"},
        resources={"requests": {"cpu": "10m"}},
        autoscaling={"minReplicas": 1, "maxReplicas": 2, "targetQueueDepth": 2},
        drainSeconds=0,
    )
    async with terminal.running(service), aiohttp.ClientSession() as client:
        snapshot = await terminal.until(is_ready)
        streams = [await ask(client, snapshot.url, tokens=1000) for _ in range(4)]
        snapshot = await terminal.until(lambda found: found.service["status"]["readyReplicas"] == 2)
        assert snapshot.service["spec"]["replicas"] == 2
        ready = {found["type"]: found["reason"] for found in snapshot.service["status"]["conditions"]}
        assert ready["ScalingReady"] == "ValidMetricFound"
        for stream in streams:
            stream.close()


async def test_a_service_that_a_cluster_would_scale_further_says_once_what_bounds_it_here(terminal: Terminal) -> None:
    service = fake_service(autoscaling={"maxReplicas": 9000})
    assert await terminal.up(service, prompt="Where?") == 0
    (line,) = [line for line in terminal.output.getvalue().splitlines() if "maxReplicas" in line]
    assert line.startswith("  note: spec.autoscaling.maxReplicas: 1 on this machine: each computes with ")
