"""A line on stderr of what a long simulation is at. `command` and `tune_command` show it.

On a terminal the line moves, and goes when the work is done. Elsewhere a line is added after a second, and then now and
then, so that a log shows that something happens.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import TextIO

_FRAME_SECONDS = 0.1
_PATIENCE_SECONDS = 1.0
_HEARTBEAT_SECONDS = 10.0
_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Says what goes on for as long as it is entered.

    Args:
        clock: seconds; only differences count.
    """

    def __init__(self, output: TextIO, clock: Callable[[], float] = monotonic) -> None:
        self._output = output
        self._clock = clock
        self._moves = output.isatty()
        self._next = clock() + (0.0 if self._moves else _PATIENCE_SECONDS)
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._moves:
            self._write(_CLEAR_LINE)

    def show(self, text: str) -> None:
        """Say it, unless something was said a moment ago."""
        now = self._clock()
        if now < self._next:
            return
        self._shown = True
        self._next = now + (_FRAME_SECONDS if self._moves else _HEARTBEAT_SECONDS)
        self._write(f"{_CLEAR_LINE}{text}" if self._moves else f"{text}\n")

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()
