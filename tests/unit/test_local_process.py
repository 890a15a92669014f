"""A container process ends when it should, and takes everything it started with it, however `paceline up` ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from paceline_operator.local import session
from paceline_operator.local.process import Process, last_words

OBEDIENT = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
WITH_CHILD = (
    "import subprocess, sys, signal\n"
    f"child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])\n"
    "print('up', flush=True)\n"
    "while True: signal.pause()"
)

Launch = Callable[[str], Awaitable[Process]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def launch(log: Path) -> Launch:
    """Start a Python program under the shim and wait for its first words."""

    async def start(program: str) -> Process:
        process = await Process.start([sys.executable, "-c", program], dict(os.environ), log)
        await until(lambda: "up" in log.read_text())
        return process

    return start


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that no event tells us: what other processes have done."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def alive(session_id: int) -> set[int]:
    """Processes of the session that are more than a zombie."""
    return {pid for pid in session.members(session_id) if "Z" not in _state(pid)}


def child_of(pid: int) -> int:
    """The only child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


async def test_a_stopped_process_gets_sigterm_and_its_own_exit_status_is_reported(launch: Launch) -> None:
    process = await launch(OBEDIENT)
    assert await process.stop(grace_seconds=10) == 0


async def test_a_process_that_ignores_sigterm_is_killed_when_its_grace_is_over(launch: Launch) -> None:
    process = await launch(STUBBORN)
    assert await process.stop(grace_seconds=0.1) == 137
    assert not alive(process.pid)


async def test_what_a_dead_process_left_behind_is_killed_too(launch: Launch) -> None:
    process = await launch(WITH_CHILD)
    await until(lambda: len(alive(process.pid)) == 3)  # shim, program, its child
    os.kill(child_of(process.pid), signal.SIGKILL)
    assert await process.wait() == 137
    assert not alive(process.pid)


async def test_a_killed_shim_takes_its_process_along(launch: Launch) -> None:
    process = await launch(WITH_CHILD)
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == 137
    await until(lambda: not alive(process.pid))


async def test_nothing_survives_a_sigkill_of_its_supervisor(tmp_path: Path) -> None:
    supervisor = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from paceline_operator.local.process import Process\n"
        "async def main():\n"
        f"    command = [sys.executable, '-c', {WITH_CHILD!r}]\n"
        f"    process = await Process.start(command, dict(os.environ), Path({str(tmp_path / 'log')!r}))\n"
        "    print(process.pid, flush=True)\n"
        "    await process.wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", supervisor, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    session_id = int(await parent.stdout.readline())
    await until(lambda: len(alive(session_id)) == 3)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(session_id))


async def test_a_command_that_does_not_exist_ends_with_127_and_says_so_in_the_log(log: Path) -> None:
    process = await Process.start(["/no/such/server"], dict(os.environ), log)
    assert await process.wait() == 127
    assert last_words(log) == "cannot run /no/such/server: No such file or directory"


def test_last_words_are_the_end_of_a_long_log_and_empty_without_one(log: Path) -> None:
    assert last_words(log) == ""
    log.write_text("early\n" * 5000 + "ValueError: the reason\n")
    words = last_words(log)
    assert words.endswith("ValueError: the reason")
    assert len(words) <= 2048
