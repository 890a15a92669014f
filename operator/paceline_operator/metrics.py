"""The operator's own metrics, in Prometheus text on its metrics port: how the operator does, not how the pods do.

Written by `kube_cluster`, `queue`, `resync` and `run`; served by `health`.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paceline_operator.cluster import Action, Apply, Delete

REGISTRY: Final = CollectorRegistry()

RECONCILE_SECONDS: Final = Histogram(
    "paceline_operator_reconcile_seconds",
    "Time of one pass over one service, in seconds",
    registry=REGISTRY,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
RECONCILE_ERRORS: Final = Counter(
    "paceline_operator_reconcile_errors_total",
    "Passes that ended with an error and are repeated, by its type",
    ["error"],
    registry=REGISTRY,
)
ACTIONS: Final = Counter(
    "paceline_operator_actions_total",
    "Writes to the API server on behalf of services; stands still while nothing changes",
    ["action", "kind"],
    registry=REGISTRY,
)
QUEUE_LENGTH: Final = Gauge("paceline_operator_queue_length", "Services that wait for their pass", registry=REGISTRY)
SERVICES: Final = Gauge("paceline_operator_services", "LLMServices at the last full list", registry=REGISTRY)
LEADER: Final = Gauge("paceline_operator_leader", "1 while this process holds the lease and acts", registry=REGISTRY)
RESYNC_TIMESTAMP: Final = Gauge(
    "paceline_operator_resync_timestamp_seconds", "Unix time of the last full list", registry=REGISTRY
)


def count_action(action: Action) -> None:
    """Count an action that was carried out."""
    match action:
        case Apply(manifest=manifest):
            kind = str(manifest["kind"])
        case Delete(kind=kind):
            pass
        case _:
            kind = "LLMService"
    ACTIONS.labels(type(action).__name__, kind).inc()


def exposition() -> bytes:
    """All metrics in Prometheus' text format."""
    return generate_latest(REGISTRY)
