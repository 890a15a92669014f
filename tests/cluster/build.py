"""Builds the programs of the test clusters into the cache, once. Called by `python -m cluster build`.

A run that is stopped loses one program at most: each is put in place whole, and Go keeps what it compiled.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster import cache
from cluster.components import COMPONENTS
from cluster.golang import find_go
from cluster.progress import step


def build(names: Sequence[str]) -> None:
    """Build those of the named components that the cache lacks, saying which and how long each takes.

    Raises:
        Unavailable: without Go.
        Failed: when one does not compile.
    """
    folder = cache.binaries()
    folder.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder):
        missing = [name for name in names if not os.access(folder / name, os.X_OK)]
        if not missing:
            print(f"  {len(names)} cluster programs are in {folder}", flush=True)
            return
        go = find_go()
        print(f"  {len(missing)} cluster programs to build into {folder}, once (ten minutes or more on 2 cores)")
        for number, name in enumerate(missing, 1):
            component = COMPONENTS[name]
            with step(f"[{number}/{len(missing)}] {name} {component.version}".rstrip()), _scratch() as scratch:
                go.build(component, scratch, folder / name)


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-build-") as folder:
        yield Path(folder)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for another build into the same folder; it may leave nothing to do."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
