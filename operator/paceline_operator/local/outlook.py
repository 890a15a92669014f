"""Whether a service that is not ready may become so by waiting. Pure; asked by `up` while a service starts."""

from __future__ import annotations

from typing import Any, Final

from paceline_operator import conditions, names
from paceline_operator.cluster import Manifest
from paceline_operator.failures import failure_of
from paceline_operator.local.state import Snapshot
from paceline_operator.local.volumes import FAILED_MOUNT
from paceline_operator.pods import condition_of, container_statuses, hindrance, unscheduled

_CANNOT_BE_MADE: Final = ("CreateContainerConfigError", "CreateContainerError")
"""Waiting reasons of a container for which this process would need another environment, or another program."""
_NEEDS_A_CHANGE: Final = (conditions.INVALID_SPEC, FAILED_MOUNT)  # of the file, or of the machine


def unmendable(snapshot: Snapshot) -> str | None:
    """Why no restart would make this service ready; None where one may. Asked of one that has never been ready.

    Nothing is to be run, a volume is missing, nothing fits onto the machine, a container cannot be made, or a server
    has ended with the status that says so.
    """
    ready = condition_of(snapshot.service, conditions.ConditionType.READY)
    if ready.get("reason") == conditions.SCALED_TO_ZERO:
        return str(ready["message"])
    degraded = condition_of(snapshot.service, conditions.ConditionType.DEGRADED)
    if degraded.get("status") == conditions.Truth.TRUE and degraded["reason"] in _NEEDS_A_CHANGE:
        return f"{degraded['reason']}: {degraded['message']}"
    hindered = [pod for pod in snapshot.pods if _cannot_be_made(pod) or _says_that_restarts_are_useless(pod)]
    if not hindered and all(map(unscheduled, snapshot.pods)):
        hindered = list(snapshot.pods)
    for pod in hindered:
        if failure := failure_of(pod, startup_seconds=0):  # none of these has ended for want of time
            return f"{failure.reason}: {failure.message}"
    return None


def hopeless(snapshot: Snapshot) -> str | None:
    """Why nobody should wait for an answer: no restart helps, or servers keep ending."""
    if reason := unmendable(snapshot):
        return reason
    degraded = condition_of(snapshot.service, conditions.ConditionType.DEGRADED)
    if degraded.get("status") != conditions.Truth.TRUE:
        return None
    if any(map(_is_stuck, snapshot.pods)):
        return f"{degraded['reason']}: {degraded['message']}"
    return None


def has_run(snapshot: Snapshot) -> bool:
    """Whether a server of the service has run and ended, and may have logged why."""
    return any(True for pod in snapshot.pods for _ in _terminations(pod))


def _says_that_restarts_are_useless(pod: Manifest) -> bool:
    return any(ended["exitCode"] == names.EXIT_CONFIG for ended in _terminations(pod))


def _cannot_be_made(pod: Manifest) -> bool:
    return any(hindrance(container) in _CANNOT_BE_MADE for container in container_statuses(pod))


def _is_stuck(pod: Manifest) -> bool:
    return any(hindrance(container) for container in container_statuses(pod))


def _terminations(pod: Manifest) -> list[dict[str, Any]]:
    """How the pod's server has ended, this time or last."""
    states = [state for container in container_statuses(pod) for state in (container["state"], container["lastState"])]
    return [state["terminated"] for state in states if "terminated" in state]
