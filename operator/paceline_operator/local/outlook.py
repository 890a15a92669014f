"""Whether a service that is not ready may become so by waiting. Pure; asked by `up` where somebody waits for it."""

from __future__ import annotations

from typing import Final

from paceline_operator import conditions
from paceline_operator.cluster import Manifest
from paceline_operator.local.progress import condition
from paceline_operator.local.state import Snapshot
from paceline_operator.local.volumes import FAILED_MOUNT

_FINAL: Final = frozenset(
    {
        conditions.INVALID_SPEC,
        FAILED_MOUNT,
        "InvalidConfiguration",
        "ModelNotFound",
        "ModelUnauthorized",
        "ModelUnsupported",
        "NoGPU",
    }
)
"""Reasons that a restart does not mend; the server's own are those of its termination message."""
_PATIENT: Final = ("ContainerCreating", "PodInitializing")  # waiting reasons that pass by themselves


def hopeless(snapshot: Snapshot) -> str | None:
    """Why waiting would not help: nothing fits, a source is missing, or the server keeps ending. None while it may."""
    ready = condition(snapshot, conditions.ConditionType.READY)
    if ready.get("reason") == conditions.SCALED_TO_ZERO:
        return str(ready["message"])
    degraded = condition(snapshot, conditions.ConditionType.DEGRADED)
    if degraded.get("status") != conditions.Truth.TRUE:
        return None
    if degraded["reason"] in _FINAL or any(_is_stuck(pod) for pod in snapshot.pods):
        return f"{degraded['reason']}: {degraded['message']}"
    return None


def has_run(snapshot: Snapshot) -> bool:
    """Whether a server of the service has run and ended, and may have logged why."""
    containers = (status for pod in snapshot.pods for status in pod["status"].get("containerStatuses", ()))
    return any("terminated" in container["state"] or container["lastState"] for container in containers)


def _is_stuck(pod: Manifest) -> bool:
    status = pod.get("status", {})
    placed = all(found["status"] == "True" for found in status.get("conditions", ()) if found["type"] == "PodScheduled")
    states = (container["state"] for container in status.get("containerStatuses", ()))
    return not placed or any(state.get("waiting", {}).get("reason", _PATIENT[0]) not in _PATIENT for state in states)
