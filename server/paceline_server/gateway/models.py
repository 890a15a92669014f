"""GET /v1/models and /v1/models/{id}. Used by `app`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from paceline_server.gateway.model_text import ModelText
from paceline_server.gateway.state import GATEWAY, Gateway, identify


async def list_models(request: web.Request) -> web.Response:
    """Every name the model is served under."""
    gateway = request.app[GATEWAY]
    identify(request)
    text = gateway.require_text()
    return web.json_response({"object": "list", "data": [_describe(gateway, text, name) for name in gateway.names]})


async def get_model(request: web.Request) -> web.Response:
    """One model, by a name that may have slashes."""
    gateway = request.app[GATEWAY]
    identify(request)
    text = gateway.require_text()
    name = request.match_info["name"]
    gateway.require_model(name)
    return web.json_response(_describe(gateway, text, name))


def _describe(gateway: Gateway, text: ModelText, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "paceline",
        "max_model_len": text.info.max_model_len,
        "task": text.info.task.value,
    }
