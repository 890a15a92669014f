"""The engine process as its parent sees it: how it is started, how it ends, and in which words. Used by `client`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline_server.config import EngineConfig
from paceline_server.model.machine import cores_given

log = logging.getLogger("paceline.client")

_EXIT_SECONDS = 2.0
"""Given to a process that has closed its socket: what it has still to tear down may take long, or hang."""


@asynccontextmanager
async def engine_process(
    command: tuple[str, ...], engine: EngineConfig
) -> AsyncIterator[tuple[Process, socket.socket]]:
    """Start an engine process; it is gone on leaving.

    Args:
        command: what to run; the number of its end of the socket is added.

    Returns:
        The process, and our end of the socket.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=DEVNULL,
            env={**_threading(engine), **os.environ},
        )
    finally:
        theirs.close()
    try:
        yield process, ours
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def see_off(process: Process) -> None:
    """Wait a moment for the end of a process that has closed its socket, and log how it ended."""
    try:
        async with asyncio.timeout(_EXIT_SECONDS):
            code = await process.wait()
    except TimeoutError:
        log.error("engine process closed its socket and does not end: it is killed")
    else:
        log.log(logging.INFO if code == 0 else logging.ERROR, "engine process ended: %s", describe_exit(code))


def describe_exit(code: int | None) -> str:
    """How a process ended, in words; negative codes are signals."""
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    hint = " (out of memory, if nobody sent it)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def _threading(engine: EngineConfig) -> dict[str, str]:
    """Environment of the engine process; what is set in ours wins.

    Compute threads that wait must not spin: on cores that are shared, a spinning thread keeps the one it waits for from
    running, and a step takes ten times as long. And numpy's must not be as many as the machine has cores.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": str(engine.threads or cores_given())}
