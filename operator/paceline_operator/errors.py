"""The operator's error tree: every failure that crosses a module boundary has a type here.

    PacelineError
    ├── InvalidSpec        the LLMService cannot be rendered; carries every mistake with its path
    ├── ChildRefused       the API server refused a child object; carries which one and why
    ├── RequestRefused     the API server refused any other request; carries its status and words
    ├── StaleObservation   an object changed between observe and execute; observe again
    ├── ClusterUnavailable the API server cannot be reached or answers 5xx/429; try later
    └── LeaseLost          another operator holds the lease; this process must end

Raised by `spec`, `kube` and `lease`; translated to conditions by `reconcile` and to back-off by `queue`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class PacelineError(Exception):
    """Root of everything this package raises on purpose."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """One mistake in a specification: where it is (`spec.autoscaling.minReplicas`) and what is wrong with it."""

    path: str
    message: str

    def __str__(self) -> str:
        """`path: message`, as it is shown in conditions and on the terminal."""
        return f"{self.path}: {self.message}"


def field_path(location: Iterable[str | int]) -> str:
    """`spec.tenants[0].name` of ("spec", "tenants", 0, "name"), as kubectl and the Kubernetes API name it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).removeprefix(".")


class InvalidSpec(PacelineError):
    """An LLMService that cannot be rendered. All mistakes at once, in the order of the fields."""

    def __init__(self, errors: tuple[FieldError, ...]) -> None:
        super().__init__("; ".join(str(error) for error in errors))
        self.errors = errors


class ChildRefused(PacelineError):
    """The API server refused a child (invalid, quota), or to delete it. `kind` and `name` say which, `detail` why."""

    def __init__(self, kind: str, name: str, detail: str) -> None:
        super().__init__(f"{kind} {name}: {detail}")
        self.kind = kind
        self.name = name
        self.detail = detail


class RequestRefused(PacelineError):
    """The API server will not do this while all stays as it is: invalid (400, 422), forbidden (401, 403).

    Or it failed (500) at an apply or a deletion, as it does at a value of the wrong type and at a webhook that is away.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StaleObservation(PacelineError):
    """An object was replaced or changed by someone else between observe and execute: nothing is wrong, look again."""


class ClusterUnavailable(PacelineError):
    """The API server cannot be reached, is overloaded or failed inside; the same request may succeed later."""


class LeaseLost(PacelineError):
    """Another operator holds the lease, or ours could not be renewed in time: stop acting at once."""
