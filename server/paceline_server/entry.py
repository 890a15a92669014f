"""The process's first moments: SIGTERM ends it with 0 from the start. The `paceline-server` script calls `main`.

The imports of `cli` take a second, many on a busy machine. Until the gateway listens nothing is under way that a drain
would have to finish, but without a handler the signal would end the process with an error, and as a container's
process 1 it would be ignored until the kubelet kills.
"""

from __future__ import annotations

import signal
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


signal.signal(signal.SIGTERM, _leave)  # the gateway's own handler, which drains, takes its place

from paceline_server.cli import main  # noqa: E402 (the handler must be there before these imports)

__all__ = ["main"]
