"""Runs the metrics adapter: TLS socket, scrape loop and certificate upkeep. Called by `paceline adapter`."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from aiohttp import web

from paceline_operator.adapter.api import GROUP_VERSION, make_app
from paceline_operator.adapter.certificates import CertificateStore
from paceline_operator.adapter.collector import Collector
from paceline_operator.adapter.errors import SetupError
from paceline_operator.adapter.front_proxy import TlsFront, read_front_proxy
from paceline_operator.adapter.settings import AdapterSettings
from paceline_operator.adapter.source import ObjectSource
from paceline_operator.errors import ClusterUnavailable, RequestRefused, StaleObservation
from paceline_operator.kube import KubeClient

UPKEEP_SECONDS: Final = 60.0
"""How soon a renewed certificate of another replica, a new front-proxy authority or a wiped caBundle is noticed."""

logger = logging.getLogger(__name__)


def api_service_path() -> str:
    """Path of the APIService that leads the API server to us; its name is fixed by the group and version."""
    group, version = GROUP_VERSION.split("/")
    return f"/apis/apiregistration.k8s.io/v1/apiservices/{version}.{group}"


def certificate_store(settings: AdapterSettings, source: ObjectSource) -> CertificateStore:
    """Return the store of the certificate that this installation shares."""
    return CertificateStore(
        source,
        secret_path=f"/api/v1/namespaces/{settings.namespace}/secrets/{settings.secret_name}",
        api_service_path=api_service_path(),
        host=f"{settings.service_name}.{settings.namespace}.svc",
    )


async def run_adapter(settings: AdapterSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        SetupError: when the installation lacks what the adapter needs.
        RequestRefused: when the adapter may not read or write it.
        ClusterUnavailable: when the API server does not answer at start; later it may come and go.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with await KubeClient.connect(settings.kubeconfig) as client, running_adapter(settings, client):
        await stop.wait()


@asynccontextmanager
async def running_adapter(
    settings: AdapterSettings, source: ObjectSource, upkeep_seconds: float = UPKEEP_SECONDS
) -> AsyncIterator[None]:
    """Serve while the block runs; a loop that fails takes the block with it. Raises as `run_adapter`."""
    store = certificate_store(settings, source)
    tls = TlsFront(await read_front_proxy(source), await store.current())
    async with aiohttp.ClientSession() as session:
        collector = Collector(source, session, settings.interval_seconds)
        runner = web.AppRunner(make_app(collector, tls.admits), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, settings.host or None, settings.port, ssl_context=tls.context).start()
            logger.info("serving %s on port %d", GROUP_VERSION, settings.port)
            async with asyncio.TaskGroup() as tasks:
                scraping = tasks.create_task(collector.run())
                upkeep = tasks.create_task(_upkeep(tls, store, source, upkeep_seconds))
                yield
                scraping.cancel()
                upkeep.cancel()
        finally:
            await runner.cleanup()


async def _upkeep(tls: TlsFront, store: CertificateStore, source: ObjectSource, interval_seconds: float) -> None:
    """Follow what may change under a running adapter. What fails now is tried again after the interval."""
    while True:
        await asyncio.sleep(interval_seconds)
        try:
            if tls.update(await read_front_proxy(source), await store.current()):
                logger.info("using a new certificate or front-proxy authority from now on")
        except (ClusterUnavailable, RequestRefused, StaleObservation, SetupError) as error:
            logger.warning("certificate upkeep failed, trying again in %.0f s: %s", interval_seconds, error)
