"""The loop around `autoscaler`: scrapes the pods, tells the cluster their load, and scales the LLMService.

The numbers come from the adapter's own collector, so what scales here is what scales in a cluster. Started by `plane`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import aiohttp

from paceline_operator import names
from paceline_operator.adapter.api import METRICS
from paceline_operator.adapter.collector import Collector
from paceline_operator.adapter.pressure import Pressure
from paceline_operator.cluster import Key, Load, Manifest
from paceline_operator.local import autoscaler
from paceline_operator.local.cluster import LoadSource, LocalCluster
from paceline_operator.local.store import Store
from paceline_operator.pods import is_ready

SYNC_SECONDS = 5.0
"""Between two looks, each with a scrape. In a cluster it is 15 s; here a human watches."""
_HISTORY_SECONDS = 3600.0  # the longest stabilisation window that Kubernetes allows


class HpaController:
    """Scales one service by its HorizontalPodAutoscaler, where it has one."""

    def __init__(self, store: Store, cluster: LocalCluster, key: Key, session: aiohttp.ClientSession) -> None:
        self._store = store
        self._cluster = cluster
        self._key = key
        self._collector = Collector(LoadSource(store), session)
        self._past: deque[autoscaler.Moment] = deque()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(SYNC_SECONDS)

    async def look(self) -> None:
        """Scrape once, and act on it."""
        await self._collector.refresh(max_age_seconds=0)
        service = self._store.get(names.KIND, self._key.name)
        if service is None:
            return
        pressure = await self._collector.pressure(self._key)
        known = pressure.measured_at is not None
        self._cluster.set_load(Load(round(pressure.queue_depth), pressure.ttft_p95) if known else Load())
        hpa = self._store.get("HorizontalPodAutoscaler", names.child_name(self._key.name))
        if hpa is not None and self._collector.ready:
            self._scale(hpa, service["spec"]["replicas"], pressure)

    def _scale(self, hpa: Manifest, replicas: int, pressure: Pressure) -> None:
        pods = self._store.list("Pod", names.selector_labels(self._key.name))
        scale = autoscaler.Scale(replicas, ready=sum(is_ready(pod) for pod in pods))
        values = {name: read(pressure) for name, read in METRICS.items()}
        now = time.monotonic()
        decision = autoscaler.decide(hpa, scale, values, self._past, now)
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
