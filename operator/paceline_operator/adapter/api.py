"""The custom.metrics.k8s.io/v1beta2 API, as far as an HPA on an LLMService needs it. Built by `server`.

Two metrics of one resource: `queue_depth` and `ttft_pressure` of llmservices.paceline.dev, one object at a time. The
API server in front has authenticated the caller and checked its rights (RBAC on the group custom.metrics.k8s.io); what
is left to us is to make sure that the peer is that API server. Reference: kubernetes/metrics, pkg/apis/custom_metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final, Protocol

from aiohttp import web

from paceline_operator import names
from paceline_operator.adapter.errors import UnknownService
from paceline_operator.adapter.pressure import WINDOW_SECONDS, Pressure
from paceline_operator.cluster import Key
from paceline_operator.errors import ClusterUnavailable, RequestRefused

GROUP_VERSION: Final = "custom.metrics.k8s.io/v1beta2"
RESOURCE: Final = f"{names.PLURAL}.{names.GROUP}"
METRICS: Final[dict[str, Callable[[Pressure], float]]] = {
    names.METRIC_QUEUE_DEPTH: lambda pressure: pressure.queue_depth,
    names.METRIC_TTFT_PRESSURE: lambda pressure: pressure.ttft_pressure,
}
WINDOWED: Final = frozenset({names.METRIC_TTFT_PRESSURE})
"""Metrics over a window of WINDOW_SECONDS; the others are of one moment."""

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LoadSource(Protocol):
    """What the API answers from: the collector, or a fake."""

    @property
    def ready(self) -> bool:
        """Whether the numbers can be trusted yet."""
        ...

    @property
    def stalled(self) -> bool:
        """Whether the source hangs."""
        ...

    async def pressure(self, key: Key) -> Pressure:
        """Load of one service. Raises UnknownService, ClusterUnavailable, RequestRefused."""
        ...


class FrontProxyCheck(Protocol):
    """Decides whether the peer of a connection is the API server, from its verified certificate (None: it has none)."""

    def __call__(self, peer_certificate: dict[str, Any] | None) -> bool:
        """Tell whether requests of this peer are answered."""
        ...


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds since start (of the load source) and since the epoch; the two are read together for timestamps."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


LOAD: Final = web.AppKey("load", LoadSource)
TRUST: Final = web.AppKey("trust", FrontProxyCheck)
CLOCKS: Final = web.AppKey("clocks", Clocks)


def make_app(load: LoadSource, trust: FrontProxyCheck, clocks: Clocks | None = None) -> web.Application:
    """Build the application; the caller serves it over TLS that asks for client certificates."""
    app = web.Application(middlewares=[_errors_as_status, _front_proxy_only])
    app[LOAD], app[TRUST], app[CLOCKS] = load, trust, clocks or Clocks()
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get(f"/apis/{GROUP_VERSION}", _resources)
    metric_path = f"/apis/{GROUP_VERSION}/namespaces/{{namespace}}/{{resource}}/{{name}}/{{metric}}"
    app.router.add_get(metric_path, _metric)
    return app


@web.middleware
async def _errors_as_status(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into the Status object that Kubernetes clients read."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _status(error.status, error.text or error.reason)
    except UnknownService as error:
        return _status(404, str(error))
    except (ClusterUnavailable, RequestRefused) as error:
        return _status(503, f"the API server did not list LLMServices: {error}")
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _status(500, "the metrics adapter failed; its log says why")


@web.middleware
async def _front_proxy_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer nobody but the API server; probes of the kubelet may see the two health paths."""
    if request.path not in ("/healthz", "/readyz"):
        certificate = request.transport.get_extra_info("peercert") if request.transport else None
        if not request.app[TRUST](certificate):
            raise web.HTTPUnauthorized(text="only the Kubernetes API server may ask; use kubectl get --raw")
    return await handler(request)


async def _healthz(request: web.Request) -> web.Response:
    stalled = request.app[LOAD].stalled
    return web.Response(text="the scrape loop hangs" if stalled else "ok", status=503 if stalled else 200)


async def _readyz(request: web.Request) -> web.Response:
    ready = request.app[LOAD].ready
    return web.Response(text="ok" if ready else "waiting for two scrape rounds", status=200 if ready else 503)


async def _resources(_: web.Request) -> web.Response:
    resources = [
        {
            "name": f"{RESOURCE}/{metric}",
            "singularName": "",
            "namespaced": True,
            "kind": "MetricValueList",
            "verbs": ["get"],
        }
        for metric in METRICS
    ]
    body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": resources}
    return web.json_response(body)


async def _metric(request: web.Request) -> web.Response:
    path = request.match_info
    if path["resource"] != RESOURCE:
        raise web.HTTPNotFound(text=f"no metrics of {path['resource']}: this adapter serves {RESOURCE}")
    if path["metric"] not in METRICS:
        raise web.HTTPNotFound(text=f"no metric {path['metric']}: there are {' and '.join(METRICS)}")
    if path["name"] == "*":
        raise web.HTTPBadRequest(text="metrics of all objects are not served: ask for one LLMService by its name")
    for selector in ("labelSelector", "metricLabelSelector"):
        if request.query.get(selector):
            raise web.HTTPBadRequest(
                text=f"{selector} is not supported: ask for one LLMService by its name, without it"
            )
    key = Key(path["namespace"], path["name"])
    pressure = await request.app[LOAD].pressure(key)
    return web.json_response(_metric_value_list(key, path["metric"], pressure, request.app[CLOCKS]))


def _metric_value_list(key: Key, metric: str, pressure: Pressure, clocks: Clocks) -> dict[str, Any]:
    """One item: the HPA takes the first and ignores the rest. Its timestamp is when the pods were last heard."""
    age = clocks.monotonic() - pressure.measured_at if pressure.measured_at is not None else 0.0
    measured = datetime.fromtimestamp(clocks.wall() - age, UTC)
    item: dict[str, Any] = {
        "describedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": key.namespace,
            "name": key.name,
        },
        "metric": {"name": metric},
        "timestamp": measured.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": quantity(METRICS[metric](pressure)),
    }
    if metric in WINDOWED:
        item["windowSeconds"] = int(WINDOW_SECONDS)
    return {"kind": "MetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": [item]}


def quantity(value: float) -> str:
    """Write a number as a Kubernetes quantity: whole, or rounded to thousandths with the suffix m."""
    thousandths = round(value * 1000)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


def _status(code: int, message: str) -> web.Response:
    reason = {400: "BadRequest", 401: "Unauthorized", 404: "NotFound", 405: "MethodNotAllowed", 500: "InternalError"}
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason.get(code, HTTPStatus(code).phrase.replace(" ", "")),
        "code": code,
    }
    return web.json_response(body, status=code)
