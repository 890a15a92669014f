"""The probes and the drain hook. Used by `app`; read by Kubernetes, by `paceline up` and by the operator."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from aiohttp import web

from paceline_server.engine.status import EngineStatus
from paceline_server.errors import NotLocal
from paceline_server.gateway.metrics import CONTENT_TYPE
from paceline_server.gateway.stall import hung, stalled
from paceline_server.gateway.state import GATEWAY, Gateway


async def healthz(request: web.Request) -> web.Response:
    """200 while this process answers and the engine's step loop moves; load does not matter."""
    status = request.app[GATEWAY].engine.status
    if hung(status):
        return web.json_response({"healthy": False, "message": _silence(status)}, status=503)
    return web.json_response({"healthy": True})


async def readyz(request: web.Request) -> web.Response:
    """200 when requests are taken; the body says how far the start is."""
    gateway = request.app[GATEWAY]
    return web.json_response(_readiness(gateway), status=200 if gateway.ready else 503)


async def drain(request: web.Request) -> web.Response:
    """Begin to drain. Answers at once; the process ends when the running requests have.

    Raises:
        NotLocal: whoever reaches a Service could end its replicas, one after the other.
    """
    if not _is_loopback(request.remote):
        raise NotLocal("/drain is for the server's own host: ask through `kubectl port-forward`", code="local_only")
    gateway = request.app[GATEWAY]
    gateway.drain.begin(by_request=True)
    return web.json_response({"draining": True, "running": gateway.drain.running}, status=202)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    return web.Response(body=request.app[GATEWAY].metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


def _readiness(gateway: Gateway) -> dict[str, Any]:
    status = gateway.engine.status
    reason, message = status.reason, status.message
    if gateway.drain.begun:
        reason, message = "Draining", f"{gateway.drain.running} requests are being finished; no new ones are taken"
    elif status.ready and gateway.texts.text is None:
        reason, message = "Loading", "the tokenizer is being loaded"
    elif stalled(status):
        reason, message = "EngineStalled", _silence(status)
    return {
        "ready": gateway.ready,
        "phase": status.phase,
        "phases": [{"name": phase.name, "seconds": _rounded(phase.seconds)} for phase in status.phases],
        "reason": reason,
        "message": message,
        "warnings": [] if gateway.engine.info is None else list(gateway.engine.info.warnings),
    }


def _is_loopback(address: str | None) -> bool:
    """Whether a peer is on this host, which in a pod is the pod. Of one that is gone already nothing is known."""
    if not address:
        return False
    peer = ip_address(address)
    return (getattr(peer, "ipv4_mapped", None) or peer).is_loopback


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _silence(status: EngineStatus) -> str:
    return f"the step loop has not moved for {status.step_age:.0f} s"
