"""The gateway as an aiohttp application. Made by `serve`, and by tests.

No application exists at import time: `create_app` makes one around a configuration and an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from paceline_server.config import ServerConfig
from paceline_server.engine.interface import Engine
from paceline_server.gateway import health, models, prefixes
from paceline_server.gateway.answers import Endpoint
from paceline_server.gateway.chat import ChatEndpoint
from paceline_server.gateway.completions import CompletionEndpoint
from paceline_server.gateway.connection import answer_expect
from paceline_server.gateway.embeddings import create_embeddings
from paceline_server.gateway.middleware import exchange
from paceline_server.gateway.service import answer
from paceline_server.gateway.state import GATEWAY, Gateway
from paceline_server.gateway.tenants import Source, follow

TEXT_TASK = web.AppKey("text_task", asyncio.Task[None])
"""Follows the engine's model; ends with an error when its tokenizer cannot be used."""


def create_app(config: ServerConfig, engine: Engine, tenants: Source | None = None) -> web.Application:
    """The application of one server; must be run with `handler_cancellation=True`.

    Args:
        tenants: reads them anew, where the configuration may change.
    """
    app = web.Application(middlewares=[exchange], client_max_size=0)  # `limits` bounds bodies
    app[GATEWAY] = Gateway(config, engine, tenants)
    app.cleanup_ctx.append(_follow_model)
    app.cleanup_ctx.append(_follow_keys)
    app.add_routes(
        [
            web.get("/healthz", health.healthz),
            web.get("/readyz", health.readyz),
            web.post("/drain", health.drain),
            web.get("/prefixes", prefixes.hot_prefixes),
            web.get("/metrics", health.metrics),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{name:.+}", models.get_model),
            web.post("/v1/chat/completions", _handler(ChatEndpoint()), expect_handler=answer_expect),
            web.post("/v1/completions", _handler(CompletionEndpoint()), expect_handler=answer_expect),
            web.post("/v1/embeddings", create_embeddings, expect_handler=answer_expect),
        ]
    )
    return app


def _handler(endpoint: Endpoint[Any]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request, endpoint)

    return handle


async def _follow_keys(app: web.Application) -> AsyncIterator[None]:
    """Take over tenants and keys that are changed in their files, as a kubelet does with a ConfigMap and a Secret."""
    book = app[GATEWAY].tenants
    task = asyncio.create_task(follow(book), name="follow the tenants' keys") if book.watched else None
    yield
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


async def _follow_model(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    task = app[TEXT_TASK] = asyncio.create_task(gateway.texts.run(), name="follow the engine's model")
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait([task])
    gateway.workers.shutdown(wait=False, cancel_futures=True)
