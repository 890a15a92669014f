"""A pod's status in Kubernetes' words, from what the kubelet of local mode knows of its one container.

Pure. `runner` keeps a `PodState` and stores its `render`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.conditions import timestamp

POD_IP = "127.0.0.1"
"""Of every local pod: what tells them apart is the port, which the pod's own `containerPort` says."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The container is not running. Reasons are the kubelet's: ContainerCreating, CrashLoopBackOff, …."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    """The container is running."""

    started_at: datetime


@dataclass(frozen=True, slots=True)
class Terminated:
    """The container has ended. `message` is its termination message."""

    exit_code: int
    message: str
    started_at: datetime
    finished_at: datetime

    @property
    def reason(self) -> str:
        """The kubelet's word for the exit status. Out of memory is not told apart: there is no cgroup to say so."""
        return "Completed" if self.exit_code == 0 else "Error"


@dataclass(frozen=True, slots=True)
class PodState:
    """What is known of a pod.

    unschedulable: why the pod waits for room on the machine; None when it has it.
    container: of its one container, with `last` being how the run before this one ended.
    started: the startup probe has succeeded; ready: the readiness probe says so.
    changed_at: when `ready` last changed.
    """

    container: Waiting | Running | Terminated = Waiting("ContainerCreating")
    last: Terminated | None = None
    restarts: int = 0
    started: bool = False
    ready: bool = False
    unschedulable: str | None = None
    started_at: datetime | None = None
    changed_at: datetime | None = None


def render(state: PodState, image: str) -> Manifest:
    """The pod's `status`."""
    if state.unschedulable is not None:
        return {"phase": "Pending", "conditions": [_condition("PodScheduled", False, state, "Unschedulable")]}
    phase = "Pending" if isinstance(state.container, Waiting) and not state.restarts else "Running"
    conditions = [
        _condition("PodScheduled", True, state),
        _condition("Initialized", True, state),
        _condition("ContainersReady", state.ready, state, "ContainersNotReady"),
        _condition("Ready", state.ready, state, "ContainersNotReady"),
    ]
    status = {
        "phase": phase,
        "conditions": conditions,
        "podIP": POD_IP,
        "hostIP": POD_IP,
        "containerStatuses": [_container_status(state, image)],
    }
    return status | ({"startTime": timestamp(state.started_at)} if state.started_at else {})


def _condition(kind: str, holds: bool, state: PodState, reason_otherwise: str = "") -> Manifest:
    condition = {"type": kind, "status": "True" if holds else "False"}
    if state.changed_at:
        condition["lastTransitionTime"] = timestamp(state.changed_at)
    if holds:
        return condition
    message = state.unschedulable or f"containers with unready status: [{names.CONTAINER}]"
    return condition | {"reason": reason_otherwise, "message": message}


def _container_status(state: PodState, image: str) -> Manifest:
    return {
        "name": names.CONTAINER,
        "image": image,
        "ready": state.ready,
        "started": state.started,
        "restartCount": state.restarts,
        "state": _container_state(state.container),
        "lastState": _container_state(state.last) if state.last else {},
    }


def _container_state(state: Waiting | Running | Terminated) -> Manifest:
    match state:
        case Waiting(reason, message):
            return {"waiting": {"reason": reason} | ({"message": message} if message else {})}
        case Running(started_at):
            return {"running": {"startedAt": timestamp(started_at)}}
        case Terminated():
            return {
                "terminated": {
                    "exitCode": state.exit_code,
                    "reason": state.reason,
                    "message": state.message,
                    "startedAt": timestamp(state.started_at),
                    "finishedAt": timestamp(state.finished_at),
                }
            }


def port(pod: Manifest, name: str | int) -> int:
    """A port of the pod by its name, or a number as it is.

    Raises:
        KeyError: no port of this name.
    """
    if isinstance(name, int):
        return name
    for container in pod["spec"]["containers"]:
        for candidate in container.get("ports", ()):
            if candidate.get("name") == name:
                return int(candidate["containerPort"])
    raise KeyError(name)
