"""One container process: started under the shim, logged to a file, ended by SIGTERM and then SIGKILL.

Called by the kubelet. Knows nothing of pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline_operator.local import session

_LAST_WORDS_BYTES = 2048
_LAST_WORDS_LINES = 80
"""How much of a log serves as termination message: the kubelet's limits for FallbackToLogsOnError."""


class Process:
    """A running command and everything it has started."""

    def __init__(self, shim: asyncio.subprocess.Process) -> None:
        self._shim = shim
        self._ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
        """Start the command with exactly this environment; both of its outputs are appended to `log`.

        A command that cannot be run ends with status 127 and says why in the log.
        """
        with log.open("ab") as output:
            shim = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # what lies in the user's working directory is not ours to import
                "-m",
                "paceline_operator.local.shim",
                *command,
                env=env,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(shim)

    @property
    def pid(self) -> int:
        """Of the shim, which leads the session."""
        return self._shim.pid

    async def wait(self) -> int:
        """Wait for the end: the exit status, 128 + signal for a command that was killed."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_seconds: float) -> int:
        """SIGTERM, and SIGKILL to everything when that has not ended the command in time. Returns the exit status."""
        self.terminate()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.wait(), grace_seconds)
        self.kill()
        return await self.wait()

    def terminate(self) -> None:
        """Ask the command to end: SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            self._shim.terminate()

    def kill(self) -> None:
        """End the command and everything it has started at once."""
        if self._shim.stdin is not None:
            self._shim.stdin.close()

    async def _wait(self) -> int:
        status = await self._shim.wait()
        self.kill()
        session.kill(self._shim.pid)  # only finds something when the shim itself was killed
        return status if status >= 0 else 128 - status


def last_words(log: Path, start: int = 0) -> str:
    """The end of a log, as a termination message, from byte `start` at the earliest; empty when there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(start, size - _LAST_WORDS_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_WORDS_LINES:]).strip()
    return ""
