"""A `paceline up` in a process of its own, which outlives the terminal. Used by `paceline up --detach`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline_operator.local.errors import StartFailed
from paceline_operator.local.invocation import PROGRAM, called_as
from paceline_operator.local.process import last_words
from paceline_operator.local.state import Snapshot, StateFolder


class Detached:
    """The process, as seen by the one that has started it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: StateFolder, log: Path) -> None:
        self._process = process
        self._folder = folder
        self._log = log

    @classmethod
    def start(cls, folder: StateFolder, arguments: Sequence[str]) -> Detached:
        """Start `paceline up` with these arguments; its output goes to the folder's log."""
        folder.make()
        descriptor, path = tempfile.mkstemp(prefix="up-", suffix=".log", dir=folder.path)
        with os.fdopen(descriptor, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline_operator.cli", "up", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, PROGRAM: called_as()},
            )
        return cls(process, folder, Path(path))

    def read(self) -> Snapshot | None:
        """The service as it is; None before there is anything to tell. Raises StartFailed when the process is gone."""
        if self._process.poll() is not None:
            words = last_words(self._log).rpartition("paceline: ")[2]
            self._drop_log()
            raise StartFailed(words or f"paceline up ended with exit code {self._process.returncode}")
        snapshot = self._folder.read()
        if snapshot is None or snapshot.pid != self._process.pid:
            return None
        self._keep_log()
        return snapshot

    async def stop(self) -> None:
        """Ask it to drain, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await asyncio.to_thread(self._process.wait)
        self._drop_log()

    def _keep_log(self) -> None:
        """The log of the process that has the service is the service's. Of several at once, who was late has none."""
        self._log = self._log.replace(self._folder.log)

    def _drop_log(self) -> None:
        if self._log != self._folder.log:
            self._log.unlink(missing_ok=True)
