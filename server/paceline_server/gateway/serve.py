"""The gateway's life: listen, serve, drain, return. Called by `cli`, beside the engine's supervisor."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import disable_created_metrics

from paceline_server.config import ServerConfig
from paceline_server.engine.interface import Engine
from paceline_server.errors import InvalidConfiguration
from paceline_server.gateway.app import TEXT_TASK, create_app
from paceline_server.gateway.connection import GatewayRunner
from paceline_server.gateway.drain import Drain
from paceline_server.gateway.state import GATEWAY
from paceline_server.gateway.tenants import Source

log = logging.getLogger("paceline.gateway")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KEEPALIVE_SECONDS = 75.0
_BACKLOG = 1024
_CLOSE_SECONDS = 5.0  # for the last bytes of answers, when all work is done


async def serve_gateway(
    config: ServerConfig,
    engine: Engine,
    *,
    tenants: Source | None = None,
    on_listening: Callable[[int], None] | None = None,
) -> bool:
    """Serve until drained: after SIGTERM, SIGINT or POST /drain, when the running requests have ended.

    Returns whether POST /drain began it.

    Args:
        tenants: reads them anew, where the configuration may change.
        on_listening: called with the port once connections are taken.

    Raises:
        InvalidConfiguration: the address cannot be listened on.
        ModelUnsupported: the loaded model's tokenizer cannot be used.
    """
    disable_created_metrics()  # a second series beside every counter and histogram, which nobody reads
    app = create_app(config, engine, tenants)
    runner = GatewayRunner(
        app,
        access_log=None,  # the middleware writes its own
        handler_cancellation=True,  # a client that goes away cancels its handler, which aborts the request
        auto_decompress=False,
        keepalive_timeout=_KEEPALIVE_SECONDS,
        shutdown_timeout=_CLOSE_SECONDS,
    )
    await runner.setup()
    drain = app[GATEWAY].drain
    try:
        port = await _listen(runner, config)
        log.info("listening on http://%s:%d", config.gateway.host, port)
        with _stopped_by_signals(drain):
            if on_listening is not None:
                on_listening(port)
            await _until_done(drain, app[TEXT_TASK])
        log.info("drained")
        return drain.by_request
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, config: ServerConfig) -> int:
    """Take connections; returns the port, which is a free one where the configuration says 0."""
    host, port = config.gateway.host, config.gateway.port
    try:
        await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
    except OSError as error:
        raise InvalidConfiguration(f"cannot listen on {host}:{port} (gateway.host, gateway.port): {error}") from None
    listening: int = runner.addresses[0][1]
    return listening


@contextmanager
def _stopped_by_signals(drain: Drain) -> Iterator[None]:
    """The first signal drains; a second one ends what still runs."""

    def stop() -> None:
        if drain.begun:
            drain.hurry()
        else:
            log.info("draining: %d requests are under way", drain.running)
            drain.begin()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _until_done(drain: Drain, text_task: asyncio.Task[None]) -> None:
    """Wait for the end of the drain; the text task ends before it only with an error."""
    drained = asyncio.create_task(drain.finished(), name="wait for the drain")
    await asyncio.wait([drained, text_task], return_when=asyncio.FIRST_COMPLETED)
    drained.cancel()
    if text_task.done():
        text_task.result()
