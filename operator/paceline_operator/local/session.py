"""The processes of one container, as the kernel groups them: a session.

A container runtime ends a container by ending its PID namespace. That needs privileges; a session does not, and a
server's children stay in it unless they call setsid. Used by the shim (inside the session) and by `process` (outside).
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_SESSION_FIELD = 3
"""Of /proc/PID/stat after the closing bracket of the name: state, parent, group, session (proc_pid_stat(5))."""


def members(session: int) -> set[int]:
    """Process ids in the session."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[_SESSION_FIELD]) == session:
                found.add(int(entry.name))
    return found


def kill(session: int) -> None:
    """SIGKILL to every process of the session but the caller itself, until none is left.

    A process can fork between being listed and being killed, so this looks again until nothing new is found.
    """
    killed: set[int] = set()
    while found := members(session) - killed - {os.getpid()}:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
