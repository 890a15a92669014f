"""Requests that no handler takes: an unknown path, or a method that a path does not have. Called by `middleware`.

A mistyped base URL is the commonest first mistake of a client, so the answer lists what is served.
"""

from __future__ import annotations

from aiohttp import web

from paceline_server.errors import InvalidRequest

_ECHOED_CHARS = 128
_BETWEEN_REPLICAS = frozenset({"/prefixes"})


def explain(error: web.HTTPException, request: web.Request) -> InvalidRequest:
    """The router's refusal in words of ours; its status stays the answer's."""
    path = request.path[:_ECHOED_CHARS]
    if isinstance(error, web.HTTPNotFound):
        served = ", ".join(_served(request.app))
        return InvalidRequest(f"{request.method} {path} is not served here; served are: {served}", code="unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
        return InvalidRequest(f"{path} takes {allowed}, not {request.method}", code="method_not_allowed")
    return InvalidRequest(error.reason)


def _served(app: web.Application) -> list[str]:
    """What clients may ask for."""
    routes = (route for route in app.router.routes() if route.method != "HEAD")
    served = ((route.method, route.resource.canonical) for route in routes if route.resource is not None)
    return [f"{method} {path}" for method, path in served if path not in _BETWEEN_REPLICAS]
