"""The one place where errors become answers, and where an exchange is logged and counted. Used by `app`."""

from __future__ import annotations

import json
import logging
import math
from time import monotonic

from aiohttp import web
from aiohttp.typedefs import Handler

from paceline_server.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    EngineUnavailable,
    InsufficientAllowance,
    InvalidRequest,
    NotServed,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
    TierNotAllowed,
    Unauthorized,
)
from paceline_server.gateway.exchange import EXCHANGE, Exchange
from paceline_server.gateway.state import GATEWAY, Gateway, dress
from paceline_server.gateway.tenants import EVERYBODY
from paceline_server.gateway.unserved import explain

log = logging.getLogger("paceline.gateway")
access_log = logging.getLogger("paceline.access")

CLIENT_GONE = 499  # nginx's status for a client that closed; only ever in the log

_REASONS: tuple[tuple[type[RequestError], str], ...] = (
    (ContextLengthExceeded, "context_length_exceeded"),  # before its base
    (InvalidRequest, "invalid_request"),
    (NotServed, "not_served"),
    (PayloadTooLarge, "payload_too_large"),
    (RequestTimeout, "request_timeout"),
    (Overloaded, "overloaded"),
    (Draining, "draining"),
    (EngineUnavailable, "engine_unavailable"),
    (DeadlineExceeded, "deadline_exceeded"),
    (Unauthorized, "unauthorized"),
    (InsufficientAllowance, "insufficient_allowance"),
    (TierNotAllowed, "tier_not_allowed"),
)
"""The label of `paceline_rejections_total` by error, and its word in the access log where the error has no code."""


@web.middleware
async def exchange(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in OpenAI's shape; log and count the exchange whatever happens."""
    gateway = request.app[GATEWAY]
    record = request[EXCHANGE] = Exchange()
    status, outcome = CLIENT_GONE, "cancelled"  # unless an answer was written to its end
    try:
        response, outcome = await _respond(request, handler, record)
        status = response.status
        return response
    finally:
        _count(gateway, record, outcome)
        _log(request, record, status, outcome)


async def _respond(request: web.Request, handler: Handler, record: Exchange) -> tuple[web.StreamResponse, str]:
    """The answer and its outcome. Cancellation and a lost connection pass through: nobody is left to answer."""
    gateway = request.app[GATEWAY]
    try:
        response = await handler(request)
        if not response.prepared:
            dress(request, response)
        return response, "completed"
    except RequestError as error:
        record.error = error.code or _reason(error) or error.type
        _count_rejection(gateway, record, error)
        refused = record.completion_tokens == 0 and error.status != RequestError.status
        return await _answer(record, error, gateway), "refused" if refused else "failed"
    except web.HTTPException as error:
        return _from_http(error, explain(error, request), record), "refused"
    except ConnectionError:
        raise
    except Exception:
        log.exception("request %s failed by a fault of the server", record.id)
        fault = RequestError("the server failed at this request; it is in its log")
        record.error = fault.type
        return await _answer(record, fault, gateway), "failed"


async def _answer(record: Exchange, error: RequestError, gateway: Gateway) -> web.StreamResponse:
    """A JSON answer, or the last frame of a stream that has begun."""
    if record.stream is not None and record.stream.response.prepared:
        await record.stream.fail(error.envelope())
        return record.stream.response
    overload_status = gateway.config.gateway.backpressure.overload_status
    status = overload_status if isinstance(error, Overloaded) else error.status
    headers = {**record.headers, **error.headers}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    response = web.json_response(error.envelope(), status=status, headers=headers)
    if isinstance(error, PayloadTooLarge | RequestTimeout | Draining):
        response.force_close()  # the rest of the body is not wanted, or the server is about to go
    return response


def _from_http(error: web.HTTPException, explained: RequestError, record: Exchange) -> web.Response:
    """The refusals of aiohttp itself: no such path, or not with this method."""
    record.error = explained.code
    headers = {name: value for name, value in error.headers.items() if name in ("Allow", "Location")}
    return web.json_response(explained.envelope(), status=error.status, headers={**headers, **record.headers})


def _reason(error: RequestError) -> str | None:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), None)


def _count_rejection(gateway: Gateway, record: Exchange, error: RequestError) -> None:
    reason = _reason(error)
    if reason is not None and record.generates and record.first_token is None:
        gateway.metrics.rejections.labels(reason).inc()


def _count(gateway: Gateway, record: Exchange, outcome: str) -> None:
    if record.generates:
        gateway.metrics.requests.labels(outcome).inc()
        if outcome == "cancelled":
            gateway.metrics.cancellations.inc()


def _log(request: web.Request, record: Exchange, status: int, outcome: str) -> None:
    line = {
        "id": record.id,
        "method": request.method,
        "path": request.path[:128],
        "status": status,
        "seconds": round(monotonic() - record.started, 4),
    }
    if record.error is not None:
        line["error"] = record.error
    if record.generates:
        line |= {
            "outcome": outcome,
            "tenant": None if record.tenant in (None, EVERYBODY) else record.tenant.name,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "ttft": None if record.ttft is None else round(record.ttft, 4),
            "finish": record.finish,
        }
    access_log.log(logging.INFO if request.path.startswith("/v1/") else logging.DEBUG, "%s", json.dumps(line))
