"""A `paceline up` in a process of its own, which outlives the terminal. Used by `paceline up --detach`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

from paceline_operator.local.errors import StartFailed
from paceline_operator.local.invocation import PROGRAM, called_as
from paceline_operator.local.process import last_words
from paceline_operator.local.state import Snapshot, StateFolder


class Detached:
    """The process, as seen by the one that has started it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: StateFolder) -> None:
        self._process = process
        self._folder = folder

    @classmethod
    def start(cls, folder: StateFolder, arguments: Sequence[str]) -> Detached:
        """Start `paceline up` with these arguments; its output goes to the folder's log."""
        folder.make()
        with folder.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline_operator.cli", "up", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, PROGRAM: called_as()},
            )
        return cls(process, folder)

    def read(self) -> Snapshot | None:
        """The service as it is; None before there is anything to tell. Raises StartFailed when the process is gone."""
        if self._process.poll() is not None:
            words = last_words(self._folder.log).rpartition("paceline: ")[2]
            raise StartFailed(words or f"paceline up ended with exit code {self._process.returncode}")
        snapshot = self._folder.read()
        return snapshot if snapshot and snapshot.pid == self._process.pid else None

    async def stop(self) -> None:
        """Ask it to drain, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await asyncio.to_thread(self._process.wait)
