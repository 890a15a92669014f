"""What the pods of every service last reported, for the columns QUEUE and TTFT-P95 of the status.

Refreshed by `run` every 15 s, which bounds how often a status is written for its numbers alone; read by `kube_cluster`
without waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from paceline_operator.adapter.errors import UnknownService
from paceline_operator.adapter.pressure import Pressure
from paceline_operator.cluster import Key, Load
from paceline_operator.errors import PacelineError

logger = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 15.0


class Meter(Protocol):
    """Measures services by asking their pods; the metrics adapter's collector is one."""

    async def refresh(self) -> None:
        """Ask all pods."""
        ...

    async def pressure(self, key: Key) -> Pressure:
        """What the pods of this service reported. Raises UnknownService."""
        ...


class LoadBoard:
    """The last measured load of each service."""

    def __init__(self, meter: Meter, interval_seconds: float = REFRESH_SECONDS) -> None:
        self._meter = meter
        self._interval = interval_seconds
        self._loads: dict[Key, Load] = {}

    def read(self, key: Key) -> Load:
        """The service's load as last measured; unknown where it was not."""
        return self._loads.get(key, Load())

    async def run(self, keys: Callable[[], Iterable[Key]], changed: Callable[[Key], None]) -> None:
        """Measure for ever, and name the services whose numbers became others."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.refresh(keys(), changed)
            except PacelineError as error:
                logger.warning("load of the services not measured: %s", error)

    async def refresh(self, keys: Iterable[Key], changed: Callable[[Key], None]) -> None:
        """Measure once."""
        await self._meter.refresh()
        before, self._loads = self._loads, {key: await self._measure(key) for key in keys}
        for key, load in self._loads.items():
            if before.get(key, Load()) != load:
                changed(key)

    async def _measure(self, key: Key) -> Load:
        try:
            pressure = await self._meter.pressure(key)
        except UnknownService:
            return Load()
        if pressure.measured_at is None:
            return Load()
        return Load(queue_depth=round(pressure.queue_depth), ttft_p95=pressure.ttft_p95)
