"""Shows a person what is being made and for how long. Used by everything here that can take minutes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

HEARTBEAT_SECONDS = 30.0  # where the output is a file or a CI log
REDRAW_SECONDS = 1.0  # on a terminal, in place


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Print `name`, the seconds as they pass, and how it ended."""
    started, done = time.monotonic(), threading.Event()
    terminal = sys.stdout.isatty()
    beat = threading.Thread(target=_tick, args=(name, started, done, terminal), daemon=True)
    if not terminal:
        print(f"  {name} …", flush=True)
    beat.start()
    outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        done.set()
        beat.join()
        print(f"{_RESET if terminal else ''}  {name}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)


_RESET = "\r\x1b[K"  # back to the start of the line, and clear it


def _tick(name: str, started: float, done: threading.Event, terminal: bool) -> None:
    """Say every now and then that it still goes on."""
    while not done.wait(REDRAW_SECONDS if terminal else HEARTBEAT_SECONDS):
        seconds = time.monotonic() - started
        if terminal:
            print(f"{_RESET}  {name} … {seconds:.0f} s", end="", flush=True)
        else:
            print(f"  {name} … {seconds:.0f} s", flush=True)
