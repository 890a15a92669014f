"""Keeps the load of every LLMService in memory, from a scrape round every few seconds. Answers the api module.

Each adapter replica scrapes by itself: two replicas may differ by a few seconds, and neither depends on the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp

from paceline_operator.adapter.discover import Pod, ServicePods, discover, service_path
from paceline_operator.adapter.errors import ScrapeError, UnknownService
from paceline_operator.adapter.pressure import HOLD, PodReport, Pressure, ServiceLoad
from paceline_operator.adapter.scrape import Sample, scrape_all
from paceline_operator.adapter.source import ObjectSource
from paceline_operator.cluster import Key
from paceline_operator.errors import ClusterUnavailable, RequestRefused

INTERVAL_SECONDS = 5.0
"""A third of the HPA's default period: what it reads is never older than this, and a window of 60 s holds 12 rounds."""
STALLED_SECONDS = 60.0
"""A round takes seconds. When none has ended for so long the loop hangs, and a restart is the remedy."""

UNSEEN = Pressure(queue_depth=0.0, ttft_p95=None, ttft_pressure=HOLD, missing=0, measured_at=None)
"""A service that is younger than the last round: its pods, if it has any yet, are loading."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tracked:
    """One service: its window, and the objective that the window is weighed against."""

    load: ServiceLoad
    ttft_objective_seconds: float


class Collector:
    """Scrape rounds and what they found. Memory is bounded by the services and pods of the last round."""

    def __init__(
        self,
        source: ObjectSource,
        session: aiohttp.ClientSession,
        interval_seconds: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._session = session
        self._interval = interval_seconds
        self._clock = clock
        self._services: dict[Key, _Tracked] = {}
        self._rounds = 0
        self._round_lock = asyncio.Lock()
        self._round_ended = clock()
        self._unreachable: set[str] = set()

    @property
    def ready(self) -> bool:
        """Whether TTFT is known: it takes two rounds to see what happened between them."""
        return self._rounds >= 2

    @property
    def stalled(self) -> bool:
        """Whether the loop of rounds hangs. An API server that does not answer is no hanging loop."""
        return self._clock() - self._round_ended > STALLED_SECONDS

    async def run(self) -> None:
        """Scrape for ever."""
        while True:
            try:
                await self.refresh()
            except (ClusterUnavailable, RequestRefused) as error:
                logger.warning("round skipped, the last numbers stand: %s", error)
            await asyncio.sleep(self._interval)

    async def refresh(self) -> None:
        """Do one round. Raises ClusterUnavailable, RequestRefused."""
        async with self._round_lock:
            try:
                await self._round()
            finally:
                self._round_ended = self._clock()

    async def pressure(self, key: Key) -> Pressure:
        """Tell the load of a service as of the last round, or UNSEEN when it was made since.

        Raises UnknownService, ClusterUnavailable, RequestRefused.
        """
        if not self._rounds:
            await self.refresh()
        if tracked := self._services.get(key):
            return tracked.load.read(self._clock(), tracked.ttft_objective_seconds)
        if await self._source.read_object(service_path(key)) is None:
            raise UnknownService(f"no LLMService {key}")
        return UNSEEN

    async def _round(self) -> None:
        found = await discover(self._source, datetime.now(UTC))
        urls = {pod.uid: pod.metrics_url for s in found.values() for pod in s.pods if pod.metrics_url}
        samples = await scrape_all(self._session, urls)
        self._log_changes(found, samples)
        services = {}
        for key, service in found.items():
            known = self._services.get(key)
            load = known.load if known else ServiceLoad()
            load.update({pod.uid: _report(pod, samples) for pod in service.pods})
            services[key] = _Tracked(load, service.ttft_objective_seconds)
        self._services = services
        self._rounds += 1

    def _log_changes(self, found: Mapping[Key, ServicePods], samples: Mapping[str, Sample | ScrapeError]) -> None:
        """Log a Ready pod that stopped answering, and one that answers again, once each."""
        unreachable = set()
        for key, service in found.items():
            for pod in service.pods:
                error = samples.get(pod.uid)
                if pod.ready and isinstance(error, ScrapeError):
                    unreachable.add(pod.uid)
                    if pod.uid not in self._unreachable:
                        logger.warning("%s: a Ready pod cannot be scraped, its last numbers stand: %s", key, error)
                elif pod.uid in self._unreachable:
                    logger.info("%s: pod %s can be scraped again", key, pod.metrics_url)
        self._unreachable = unreachable


def _report(pod: Pod, samples: Mapping[str, Sample | ScrapeError]) -> PodReport:
    sample = samples.get(pod.uid)
    return PodReport(sample if isinstance(sample, Sample) else None, ready=pod.ready, loading=pod.loading)
