"""The full re-list: names every service to the queue now and then, so that no lost event stays lost.

Also the operator's pulse: its age is what the liveness probe looks at. Run by `run` while the lease is held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from paceline_operator import metrics, names
from paceline_operator.cluster import Key
from paceline_operator.errors import ClusterUnavailable, RequestRefused
from paceline_operator.kube import KubeClient

logger = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 5.0
# How many intervals may pass without a list before the operator counts as hung; an API server's restart may cost one.
_STALE_INTERVALS: Final = 2.5


class Resync:
    """Lists the services of some namespaces (none: of all) and remembers when it could."""

    def __init__(
        self,
        client: KubeClient,
        namespaces: tuple[str, ...],
        interval_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._paths = [f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}" for namespace in namespaces]
        self._paths = self._paths or [f"/apis/{names.API_VERSION}/{names.PLURAL}"]
        self._interval = interval_seconds
        self._clock = clock
        self._last: float | None = None

    @property
    def stale(self) -> bool:
        """Whether the last list is so old that something must be wrong. Never before `run`: a standby lists nothing."""
        return self._last is not None and self._clock() - self._last > self._interval * _STALE_INTERVALS

    async def run(self, enqueue: Callable[[Key], None], known: Callable[[], Iterable[Key]]) -> None:
        """List for ever, naming every service each time: those that are there and those that were `known` to be."""
        self._last = self._clock()
        while True:
            try:
                listed = await self._list()
            except (ClusterUnavailable, RequestRefused) as error:
                logger.warning("full list failed, again in %.0f s: %s", _RETRY_SECONDS, error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            for key in sorted(listed.union(known())):
                enqueue(key)
            await asyncio.sleep(self._interval)

    async def _list(self) -> set[Key]:
        found = [service for path in self._paths for service in await self._client.list_objects(path, fresh=True)]
        self._last = self._clock()
        metrics.SERVICES.set(len(found))
        metrics.RESYNC_TIMESTAMP.set_to_current_time()
        return {Key(one["metadata"]["namespace"], one["metadata"]["name"]) for one in found}
