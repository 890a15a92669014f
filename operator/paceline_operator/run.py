"""`paceline operator`: everything wired together, run until the process is told to end or loses its lease.

Called by `cli`. Order matters: endpoints first, then the CRD, so that an operator which cannot act is not ready and the
one before it stays; then the lease, and only with the lease anything that writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from paceline_operator import handlers, health, metrics
from paceline_operator.adapter.collector import Collector
from paceline_operator.crd import CrdWatch
from paceline_operator.errors import PacelineError
from paceline_operator.kube import KubeClient, NamespacedSource
from paceline_operator.kube_cluster import KubeCluster
from paceline_operator.lease import Lease
from paceline_operator.load_board import LoadBoard
from paceline_operator.queue import KeyedQueue, Worker
from paceline_operator.reconcile import reconcile
from paceline_operator.resync import Resync
from paceline_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)


def run_operator(settings: OperatorSettings) -> int:
    """Run the operator until SIGTERM or SIGINT. Returns the exit code: 0 when told to end, 1 when it cannot go on."""
    code = 0
    try:
        asyncio.run(_run(settings))
    except* PacelineError as group:
        code = 1
        for error in _leaves(group):
            logger.error("%s: %s", type(error).__name__, error)
    return code


async def _run(settings: OperatorSettings) -> None:
    stop = _stop_signal()
    kubeconfig = settings.kubeconfig
    async with await KubeClient.connect(kubeconfig) as client, await KubeClient.connect(kubeconfig) as for_lease:
        operator = _Operator(client, for_lease, settings)
        async with operator.serving():
            if not await _until(stop, operator.stand_by()):
                return
            metrics.LEADER.set(1)
            try:
                await _until(stop, operator.lead())
            finally:
                metrics.LEADER.set(0)
                await operator.lease.release()


class _Operator:
    """The parts that live as long as the process."""

    def __init__(self, client: KubeClient, for_lease: KubeClient, settings: OperatorSettings) -> None:
        self._client = client
        self._settings = settings
        self._crd = CrdWatch(client)
        self._resync = Resync(client, settings.namespaces, settings.resync_seconds)
        identity = settings.identity or f"{socket.gethostname()}-{os.getpid()}"
        self.lease = Lease(
            for_lease, settings.lease_namespace, settings.lease_name, identity, seconds=settings.lease_seconds
        )

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Serve the endpoints while the context lasts."""
        return health.serving(
            is_alive=lambda: not self._resync.stale,
            complaint=lambda: self._crd.complaint,
            health_port=self._settings.health_port,
            metrics_port=self._settings.metrics_port,
        )

    async def stand_by(self) -> None:
        """Wait until the API server knows services as this operator does, then for the lease."""
        await self._crd.wait()
        await self.lease.acquire()

    async def lead(self) -> None:
        """Hold the lease, and act meanwhile. The first part that fails takes the others with it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.lease.keep())
            group.create_task(self._act())

    async def _act(self) -> None:
        """Everything that writes on behalf of services."""
        queue, namespaces = KeyedQueue(), self._settings.namespaces
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            board = LoadBoard(Collector(NamespacedSource(self._client, namespaces), session))
            cluster = KubeCluster(self._client, board.read)
            worker = Worker(queue, lambda key: reconcile(cluster, key, self._settings.server_image))
            group.create_task(handlers.watch(namespaces, queue.add, self._client.credentials))
            group.create_task(self._resync.run(queue.add, lambda: cluster.index))
            group.create_task(worker.run(self._settings.workers))
            group.create_task(board.run(lambda: cluster.index, queue.add))


def _stop_signal() -> asyncio.Event:
    """An event that is set when the process is told to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` until it ends or the process is told to end. Whether `work` ended by itself; raises what it raised."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _leaves(group: BaseExceptionGroup[PacelineError]) -> Iterator[PacelineError]:
    """The errors themselves, however deeply the task groups have nested them."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
