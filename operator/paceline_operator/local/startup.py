"""How far the servers of the pods have come in starting, from their /readyz. Only for people: nothing is decided by it.

`served` runs a `StartupWatch` beside the plane; `up` shows its phases and warnings, `status` the warnings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.local import pod as pods_
from paceline_operator.local.state import Phase, Start
from paceline_operator.local.store import Store
from paceline_operator.pods import is_ready, is_running, restart_count
from paceline_operator.vocabulary import in_words_of_the_spec

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 2.0
START_PROCESS = "start_process"
"""The phase before the server's own: until it answers at all."""


class _Watched:
    """One start of one server: what it last told of it, and when its current phase was first seen."""

    def __init__(self, now: float) -> None:
        self.over = False
        self._finished: tuple[Phase, ...] = ()
        self._current: str | None = START_PROCESS
        self._since = now
        self._warnings: tuple[str, ...] = ()

    def take(self, answer: dict[str, Any], now: float) -> None:
        """Take in an answer of /readyz."""
        told = answer["phases"]
        if self._current == START_PROCESS:
            self._finished = (Phase(START_PROCESS, now - self._since, done=True),)
        begun = next((phase["name"] for phase in told if phase["seconds"] is None), None)
        done = tuple(
            Phase(phase["name"], phase["seconds"], done=True) for phase in told if phase["seconds"] is not None
        )
        self._finished = self._finished[:1] + done
        if begun != self._current:
            self._current, self._since = begun, now
        self._warnings = tuple(map(in_words_of_the_spec, answer.get("warnings", ())))
        self.over = answer["ready"]

    def finish(self, now: float) -> None:
        """The server is ready, whatever it says of its phases."""
        self._finished, self._current = tuple(replace(phase, done=True) for phase in self._phases(now)), None
        self.over = True

    def start(self, now: float) -> Start:
        """All that is known, as of now."""
        return Start(self._phases(now), self._warnings, self.over)

    def _phases(self, now: float) -> tuple[Phase, ...]:
        if self._current is None:
            return self._finished
        return (*self._finished, Phase(self._current, now - self._since, done=False))


class StartupWatch:
    """The starts of every pod of a store."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._starts: dict[tuple[str, int], _Watched] = {}  # by pod and restart count

    def starts(self) -> dict[str, Start]:
        """Each pod's present start; none of a pod whose new start has not been seen yet."""
        now = self._clock()
        present = ((pod["metadata"]["name"], restart_count(pod)) for pod in self._store.list("Pod"))
        return {key[0]: self._starts[key].start(now) for key in sorted(present) if key in self._starts}

    async def run(self) -> None:
        """Ask servers that start, until cancelled. One that does not answer does not listen yet, or ends just now."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS)) as session:
            while True:
                pods = {pod["metadata"]["name"]: pod for pod in self._store.list("Pod")}
                self._starts = {key: start for key, start in self._starts.items() if key[0] in pods}
                await asyncio.gather(*(self._ask(session, pod) for pod in pods.values() if is_running(pod)))
                await asyncio.sleep(_POLL_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, pod: Manifest) -> None:
        start = self._starts.setdefault((pod["metadata"]["name"], restart_count(pod)), _Watched(self._clock()))
        if start.over:
            return
        url = f"http://{pods_.POD_IP}:{pods_.port(pod, names.PORT_NAME)}/readyz"
        try:
            async with session.get(url) as answer:
                start.take(await answer.json(), self._clock())
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
            if is_ready(pod):
                start.finish(self._clock())
