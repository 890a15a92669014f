"""Every error this package raises on purpose, as one tree.

    PacelineError
    ├── StartupError            the server cannot serve: it exits; `reason` reaches the pod's status. All but
    │   │                           EngineFailed exit with status 78: as things are, a restart changes nothing
    │   ├── InvalidConfiguration    the configuration file or a flag is wrong
    │   ├── ModelNotFound           no such model in the store or on the hub
    │   ├── ModelUnauthorized       the hub wants a (better) token
    │   ├── ModelUnsupported        the model needs something we do not honour
    │   ├── NoGPU                   device: cuda without a usable GPU
    │   ├── OutOfMemory             weights or KV cache do not fit
    │   ├── NativeUnavailable       the CPU kernels are asked for, and are neither compiled nor can they be
    │   └── EngineFailed            the engine process died while starting, or soon after each start (exit status 1)
    └── RequestError            one request cannot be served: it becomes an HTTP answer in OpenAI's error shape
        ├── InvalidRequest          400, names the parameter
        │   └── ContextLengthExceeded   400, code context_length_exceeded
        ├── Unauthorized            401: no API key though one is needed, or an unknown one
        ├── NotServed               404, unknown model
        ├── PayloadTooLarge         413
        ├── RequestTimeout          408, the body comes too slowly
        ├── InsufficientAllowance   429: the tenant has used what it may, in a minute or in a day
        │   ├── RequestRateExceeded     requests per minute, with Retry-After
        │   ├── TokenRateExceeded       tokens per minute, with Retry-After
        │   │   └── RequestTooLarge         more than the limit of a minute alone
        │   └── QuotaExceeded           tokens per day, with Retry-After until midnight
        ├── Overloaded              503 (or 429 by configuration) with Retry-After
        ├── Draining                503 with Retry-After
        ├── EngineUnavailable       503 with Retry-After: not ready yet, or restarting
        ├── DeadlineExceeded        504: the request's time was over before its first token
        ├── TierNotAllowed          403: the caller may not use this tier or priority
        ├── NotLocal                403: asked over the network for what only the server's own host may ask
        └── EngineLost              500: the engine died while it worked on this request

Callers: startup errors are translated in `cli` (exit code, termination log), request errors in the gateway's one
error middleware. Nothing else catches broadly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

EX_CONFIG = 78
"""Of sysexits.h: `paceline up` ends at this status where a service has never been ready; a kubelet restarts anyway."""


class PacelineError(Exception):
    """Base of all errors raised on purpose; its text is written for the user."""


class StartupError(PacelineError):
    """The server cannot start or go on. `reason` is the CamelCase word that shows up in a condition."""

    reason: ClassVar[str] = "EngineFailed"
    exit_code: ClassVar[int] = EX_CONFIG


class InvalidConfiguration(StartupError):
    """The configuration is wrong."""

    reason = "InvalidConfiguration"


class ModelNotFound(StartupError):
    """The model is in no place that the server may look at."""

    reason = "ModelNotFound"


class ModelUnauthorized(StartupError):
    """The hub refused the download for want of a token or of access."""

    reason = "ModelUnauthorized"


class ModelUnsupported(StartupError):
    """The model needs something that this engine does not honour; the message names it."""

    reason = "ModelUnsupported"


class NoGPU(StartupError):
    """A CUDA device is asked for and none is usable."""

    reason = "NoGPU"


class OutOfMemory(StartupError):
    """Weights or KV cache do not fit into the memory given."""

    reason = "OutOfMemory"


class NativeUnavailable(StartupError):
    """The CPU kernels are not there: not in the package, and they cannot be compiled here."""

    reason = "NativeUnavailable"


class EngineFailed(StartupError):
    """The engine process ended before it was ready or soon after; a reason without a name of its own may pass."""

    reason = "EngineFailed"
    exit_code = 1


STARTUP_ERRORS: dict[str, type[StartupError]] = {
    error.reason: error
    for error in (
        InvalidConfiguration,
        ModelNotFound,
        ModelUnauthorized,
        ModelUnsupported,
        NoGPU,
        OutOfMemory,
        NativeUnavailable,
        EngineFailed,
    )
}
"""By `reason`: how a startup error crosses the wire from the engine process."""


class RequestError(PacelineError):
    """One request is answered with an error.

    Args:
        message: for the caller: what is wrong and what to do.
        param: the request field at fault, or None.
        code: machine-readable word of OpenAI's error object, or None.
        retry_after: seconds for the Retry-After header, or None.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    headers: ClassVar[Mapping[str, str]] = {}
    """Headers that every answer with this error has, besides Retry-After."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The body of the answer, in the shape of OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(RequestError):
    """The caller's fault; the same request will fail again."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt plus max_tokens, is longer than the model's context, the KV pool or a batch."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class Unauthorized(RequestError):
    """The caller did not say who it is, though it has to, or nobody knows its key."""

    status = 401
    type = "invalid_request_error"
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}


class NotServed(RequestError):
    """The named model is not served here."""

    status = 404
    type = "invalid_request_error"


class PayloadTooLarge(RequestError):
    """The body is larger than gateway.max_body_bytes."""

    status = 413
    type = "invalid_request_error"


class RequestTimeout(RequestError):
    """The body arrives too slowly to be waited for."""

    status = 408
    type = "invalid_request_error"


class InsufficientAllowance(RequestError):
    """The tenant has used what it may: its own doing, unlike overload. `type` and `code` are OpenAI's words."""

    status = 429
    limit: ClassVar[str] = ""
    """The configuration's word for what is used up."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message, code="rate_limit_exceeded", retry_after=retry_after)


class RequestRateExceeded(InsufficientAllowance):
    """As many requests as the tenant may send in a minute."""

    type = "requests"
    limit = "requests_per_minute"


class TokenRateExceeded(InsufficientAllowance):
    """As many tokens as the tenant may use in a minute."""

    type = "tokens"
    limit = "tokens_per_minute"


class RequestTooLarge(TokenRateExceeded):
    """More tokens than the tenant may use in a minute, in one request: waiting does not help."""

    headers: ClassVar[Mapping[str, str]] = {"x-should-retry": "false"}


class QuotaExceeded(InsufficientAllowance):
    """As many tokens as the tenant may use in a day."""

    type = "insufficient_quota"
    limit = "daily_tokens"
    headers: ClassVar[Mapping[str, str]] = {"x-should-retry": "false"}

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after=retry_after)
        self.code = "insufficient_quota"


class Overloaded(RequestError):
    """The bounded queue has no room. The status is 503 unless backpressure.overload_status says 429."""

    status = 503
    type = "overloaded_error"


class Draining(RequestError):
    """The server finishes what runs and takes nothing new."""

    status = 503
    type = "overloaded_error"


class EngineUnavailable(RequestError):
    """No engine is ready: it starts, or it is being restarted."""

    status = 503
    type = "overloaded_error"


class DeadlineExceeded(RequestError):
    """The request's time was over before its first token: it never took a slot.

    504 is what gRPC's DEADLINE_EXCEEDED maps to, and no client takes it for overload. OpenAI's clients repeat every
    status from 500 on unless the answer says otherwise; nobody waits for the repetition of this one.
    """

    status = 504
    type = "timeout_error"
    headers: ClassVar[Mapping[str, str]] = {"x-should-retry": "false"}

    def __init__(self, message: str) -> None:
        super().__init__(message, code="deadline_exceeded")


class TierNotAllowed(RequestError):
    """The caller asks for a tier or a priority that it may not use."""

    status = 403
    type = "invalid_request_error"


class NotLocal(RequestError):
    """Asked over the network for what only a process of the server's own host, or pod, may ask."""

    status = 403
    type = "invalid_request_error"


class EngineLost(RequestError):
    """The engine died while it worked on this request; part of the answer may have been sent."""

    status = 500
    type = "server_error"
