"""The loop around `autoscaler`: scrapes the pods and scales the LLMService.

The numbers come from the adapter's own collector, so what scales here is what scales in a cluster. Started by `plane`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

import aiohttp

from paceline_operator import names
from paceline_operator.adapter.api import METRICS
from paceline_operator.adapter.collector import Collector
from paceline_operator.adapter.pressure import Pressure
from paceline_operator.cluster import Key, Load, Manifest
from paceline_operator.load_board import LoadBoard
from paceline_operator.local import autoscaler
from paceline_operator.local.cluster import LoadSource
from paceline_operator.local.room import Room, bounded
from paceline_operator.local.store import Store
from paceline_operator.pods import is_ready

SYNC_SECONDS = 2.0
"""Between two looks, each with a scrape. In a cluster it is 15 s; here a human watches."""
_HISTORY_SECONDS = 3600.0  # the longest stabilisation window that Kubernetes allows


class HpaController:
    """Scales one service by its HorizontalPodAutoscaler, where it has one, as far as the machine has room."""

    def __init__(self, store: Store, key: Key, session: aiohttp.ClientSession, most: Room | None = None) -> None:
        self._most = most
        self._store = store
        self._key = key
        self._collector = Collector(LoadSource(store), session)
        self._board = LoadBoard(self._collector)
        self._past: deque[autoscaler.Moment] = deque()

    def read_load(self, key: Key) -> Load:
        """What the pods of the service last reported."""
        return self._board.read(key)

    async def run(self) -> None:
        """Look for ever: every few seconds, and whenever a pod has become ready, so that its numbers have a start."""
        while True:
            await self._look()
            ready = self._ready()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SYNC_SECONDS):
                    while self._ready() == ready:
                        await self._store.wait_for_change(self._store.version)

    async def _look(self) -> None:
        """Scrape once, and act on it."""
        await self._board.refresh([self._key], lambda _: self._store.touch())
        service = self._store.get(names.KIND, self._key.name)
        hpa = self._store.get("HorizontalPodAutoscaler", names.child_name(self._key.name))
        if service is not None and hpa is not None and self._collector.ready:
            self._scale(hpa, service["spec"]["replicas"], await self._collector.pressure(self._key))

    def _ready(self) -> set[str]:
        pods = self._store.list("Pod", names.selector_labels(self._key.name))
        return {pod["metadata"]["uid"] for pod in pods if is_ready(pod)}

    def _scale(self, hpa: Manifest, replicas: int, pressure: Pressure) -> None:
        scale = autoscaler.Scale(replicas, ready=len(self._ready()))
        values = {name: read(pressure) for name, read in METRICS.items()}
        now = time.monotonic()
        decision = autoscaler.decide(bounded(hpa, self._most), scale, values, self._past, now)
        self._remember(autoscaler.Moment(now, decision.proposed, decision.replicas - replicas))
        self._store.scale(names.KIND, self._key.name, decision.replicas)
        status = {
            "currentReplicas": replicas,
            "desiredReplicas": decision.replicas,
            "conditions": list(decision.conditions),
        }
        self._store.set_status("HorizontalPodAutoscaler", hpa["metadata"]["name"], status)

    def _remember(self, moment: autoscaler.Moment) -> None:
        self._past.append(moment)
        while self._past[0].at < moment.at - _HISTORY_SECONDS:
            self._past.popleft()
