"""Conditions of an LLMService: their types and reasons, how they age, and which changes are worth an event.

What the conditions say is decided in `status`; here is what all of them have in common. Pure: time is a parameter.
Source of the rules: Kubernetes API conventions, "Typical status properties".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from paceline_operator.cluster import EmitEvent


class ConditionType(StrEnum):
    """The conditions that every reconciled LLMService has."""

    READY = "Ready"  # at least one replica answers requests
    PROGRESSING = "Progressing"  # a rollout, start or scaling is under way and moves
    DEGRADED = "Degraded"  # something fails, whether or not requests are still answered
    SCALING_READY = "ScalingReady"  # the HorizontalPodAutoscaler gets its metrics and acts on them


class Truth(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


# --- Reasons: what is right -------------------------------------------------------------------------------------------

SERVING: Final = "Serving"  # Ready: requests are answered and nothing fails
SERVING_DEGRADED: Final = "ServingDegraded"  # Ready: requests are answered, but see Degraded
UP_TO_DATE: Final = "UpToDate"  # Progressing: every pod is of the current revision and ready
AS_EXPECTED: Final = "AsExpected"  # Degraded: nothing fails

# --- Reasons: what is under way ---------------------------------------------------------------------------------------

CREATING_PODS: Final = "CreatingPods"  # no pod of the current revision exists yet
STARTING: Final = "Starting"  # a pod waits for a node, an image or a volume
LOADING: Final = "Loading"  # a server runs and loads its model or warms up
ROLLING_OUT: Final = "RollingOut"  # pods of an older revision are being replaced
SCALING: Final = "Scaling"  # the number of pods approaches spec.replicas
WAITING_FOR_GARBAGE_COLLECTION: Final = "WaitingForGarbageCollection"  # deleted children are still there

# --- Reasons: what is wrong -------------------------------------------------------------------------------------------
# A server that fails says its own reason in its termination message (ModelNotFound, OutOfMemory, …); Kubernetes' own
# reasons (CreateContainerConfigError, Evicted, …) are passed on as they are.

SCALED_TO_ZERO: Final = "ScaledToZero"  # Ready is False because spec.replicas is 0
DRAINED: Final = "Drained"  # Ready is False because POST /drain has ended the server, which is started again
NOT_READY: Final = "NotReady"  # a server that was ready is not: it drains, or its engine restarts
INVALID_SPEC: Final = "InvalidSpec"  # the operator cannot render this specification; the message has all mistakes
NAME_CONFLICT: Final = "NameConflict"  # an object that belongs to somebody else has the name of a child
CHILD_REFUSED: Final = "ChildRefused"  # the API server refused a child, or to delete one
FORBIDDEN: Final = "Forbidden"  # the operator may not read what it has to; the message has verb, resource, namespace
NODE_NOT_READY: Final = "NodeNotReady"  # a pod's node does not report any more
PODS_REFUSED: Final = "PodsRefused"  # the API server refused the Deployment's pods (quota, pod security)
UNSCHEDULABLE: Final = "Unschedulable"  # no node takes a pod
NO_SPARE_GPU: Final = "NoSpareGPU"  # no node takes a pod, for want of a free GPU
IMAGE_PULL_BACK_OFF: Final = "ImagePullBackOff"  # the image cannot be pulled (first try or back-off alike)
OOM_KILLED: Final = "OOMKilled"  # the kernel ended the server at its memory limit
CRASHED: Final = "Crashed"  # the server ended without saying why; the message has its exit code and last lines
KILLED: Final = "Killed"  # SIGKILL has ended the server, and neither a probe nor its memory limit has sent it
STARTUP_TIMEOUT: Final = "StartupTimeout"  # the model was not loaded within spec.startupSeconds
RESTARTED: Final = "Restarted"  # the kubelet ended and restarts a server that stopped answering
PROGRESS_DEADLINE_EXCEEDED: Final = "ProgressDeadlineExceeded"  # a rollout does not move

# --- Reasons: scaling -------------------------------------------------------------------------------------------------
# While autoscaling is on, the HPA's own reasons are passed on (ValidMetricFound, FailedGetObjectMetric, …).

AUTOSCALING_OFF: Final = "AutoscalingOff"  # spec.autoscaling is absent
WAITING_FOR_HPA: Final = "WaitingForHPA"  # the HPA has not reported yet

_LONGEST_MESSAGE: Final = 32_768  # characters, the CRD's limit: a status with a longer one would be refused whole
_WARNING_TYPE: Final = "Warning"
_NORMAL_TYPE: Final = "Normal"
# Reasons that are no news when they are the first thing said about a new service.
_QUIET: Final = frozenset({AS_EXPECTED, AUTOSCALING_OFF, WAITING_FOR_HPA, UP_TO_DATE})
# Reasons for not being ready that are nobody's failure.
_PEACEFUL: Final = frozenset(
    {
        CREATING_PODS,
        STARTING,
        LOADING,
        SCALED_TO_ZERO,
        DRAINED,
        AUTOSCALING_OFF,
        WAITING_FOR_HPA,
        WAITING_FOR_GARBAGE_COLLECTION,
    }
)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition as it should now be said; when it became so is found out by `settle`."""

    type: ConditionType
    status: Truth
    reason: str
    message: str


def settle(
    previous: Sequence[dict[str, Any]], fresh: Sequence[Condition], generation: int, now: datetime
) -> list[dict[str, Any]]:
    """The conditions as they go into status. `lastTransitionTime` moves only with the condition's status."""
    since = {condition["type"]: condition for condition in previous}
    moment = timestamp(now)
    return [
        {
            "type": condition.type.value,
            "status": condition.status.value,
            "reason": condition.reason,
            "message": condition.message[:_LONGEST_MESSAGE],
            "observedGeneration": generation,
            "lastTransitionTime": _transition_time(since.get(condition.type.value), condition, moment),
        }
        for condition in fresh
    ]


def transition_events(uid: str, previous: Sequence[dict[str, Any]], fresh: Sequence[Condition]) -> list[EmitEvent]:
    """One event for each condition that changed its status, or its reason where that is news in itself."""
    before = {condition["type"]: (condition["status"], condition["reason"]) for condition in previous}
    return [
        EmitEvent(
            uid, _event_type(condition), condition.reason, f"{condition.type}={condition.status}: {condition.message}"
        )
        for condition in fresh
        if _is_news(before.get(condition.type.value), condition)
    ]


def timestamp(moment: datetime) -> str:
    """RFC 3339 with seconds, as Kubernetes writes times."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _transition_time(previous: dict[str, Any] | None, condition: Condition, moment: str) -> str:
    if previous and previous["status"] == condition.status:
        return str(previous["lastTransitionTime"])
    return moment


def _is_news(before: tuple[str, str] | None, condition: Condition) -> bool:
    if before is None:
        return condition.reason not in _QUIET
    status, reason = before
    # Progressing names the stages of a start, which Ready names too.
    return status != condition.status or (
        reason != condition.reason and condition.type is not ConditionType.PROGRESSING
    )


def _event_type(condition: Condition) -> str:
    healthy = Truth.FALSE if condition.type is ConditionType.DEGRADED else Truth.TRUE
    peaceful = condition.status is healthy or condition.reason in _PEACEFUL or condition.reason == UP_TO_DATE
    return _NORMAL_TYPE if peaceful else _WARNING_TYPE
