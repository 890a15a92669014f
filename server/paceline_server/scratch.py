"""Temporary folders that do not stay behind, however their process ends. Used by `convert` and by the model scripts.

A folder is locked while its process lives. Whoever asks for one next removes those of the same name that nobody holds:
a process that is killed cannot clean up itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_ENDED_BY_SIGTERM = 128 + signal.SIGTERM  # the shell's status for it


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """An empty folder below `parent` for as long as the context lasts; a `prefix` belongs to one kind of work.

    It may be renamed inside the context, to keep what it holds.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent):  # so that nobody sweeps a folder between its making and its lock
        for left in parent.glob(f"{prefix}*"):
            _remove_if_left(left)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def unwind_on_sigterm() -> None:
    """Let SIGTERM end this process by an exception, as Ctrl-C does, so that contexts are left in order."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(_ENDED_BY_SIGTERM)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # not a folder, not ours, or gone
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # at work
    finally:
        os.close(lock)
