"""The phases of a start, and the one that needs no torch: finding the model, by download where it is missing.

`engine.process` finds the model before it imports what loads it, so that a model that is not there is told at once;
`startup` goes through the other phases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from paceline_server.engine.status import StartupPhase
from paceline_server.model import hub
from paceline_server.model.store import HubModel, resolve, store_root

OnPhase = Callable[[StartupPhase], None]


@contextmanager
def phase(name: str, on_phase: OnPhase) -> Iterator[None]:
    """Report a phase at its begin, and at its end with its seconds."""
    begin = perf_counter()
    on_phase(StartupPhase(name))
    yield
    on_phase(StartupPhase(name, perf_counter() - begin))


def find_model(model_path: str, on_phase: OnPhase) -> Path:
    """The model's folder; a download is the phase `fetch_model`.

    Raises:
        StartupError: see `store.resolve` and `hub.download`.
    """

    def fetch(model: HubModel, folder: Path) -> None:
        with phase("fetch_model", on_phase):
            hub.download(model, folder)

    return resolve(model_path, store_root(os.environ), fetch)
