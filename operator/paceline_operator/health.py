"""The operator's HTTP endpoints: /healthz and /readyz on one port, /metrics on another. Served by `run` throughout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from paceline_operator import metrics


@asynccontextmanager
async def serving(
    is_alive: Callable[[], bool], complaint: Callable[[], str | None], *, health_port: int, metrics_port: int
) -> AsyncIterator[None]:
    """Serve while the context lasts. Both functions are asked at every probe.

    A replica that waits for the lease is ready: it can take over, and an upgrade needs it to be ready before the old
    one goes. One that has a complaint is not: `helm install --wait` fails with it, and an upgrade keeps the old one.
    """

    async def healthz(_: web.Request) -> web.Response:
        alive = is_alive()
        return web.Response(text="ok\n" if alive else "the last full list is too old\n", status=200 if alive else 503)

    async def readyz(_: web.Request) -> web.Response:
        wrong = complaint()
        return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    health, numbers = web.Application(), web.Application()
    health.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    numbers.add_routes([web.get("/metrics", exposition)])
    async with _listening(health, health_port), _listening(numbers, metrics_port):
        yield


@asynccontextmanager
async def _listening(application: web.Application, port: int) -> AsyncIterator[None]:
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
