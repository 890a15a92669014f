"""The status of an LLMService, computed from what was observed. Pure; called by `reconcile` as its last decision."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from paceline_operator import conditions as c
from paceline_operator import names
from paceline_operator.cluster import Key, Load, Manifest, Observed
from paceline_operator.conditions import Condition, ConditionType, Truth
from paceline_operator.failure import Failure, forbidden
from paceline_operator.failures import failure_of, is_waiting_for_room
from paceline_operator.ownership import is_ours
from paceline_operator.pods import (
    Census,
    condition_of,
    has_started,
    is_running,
    labelled_revision,
    take_census,
    was_drained,
)

_TTFT_DIGITS: Final = 3  # milliseconds


@dataclass(frozen=True, slots=True)
class Situation:
    """What the conditions are computed from.

    replicas: as the specification wants them.
    autoscaling: whether the specification asks for it.
    revision: of the pods that should run; the last one that was rendered while the specification is invalid.
    census: the service's pods.
    pods_seen: whether the pods could be read; of those that could not, `census` counts none.
    failure: what stands in the way, a blocked reconciliation before a failing pod; None when nothing fails.
    deployment: the child, where it exists and its status is about `revision`.
    hpa: the child with its status, where it exists.
    """

    replicas: int
    autoscaling: bool
    revision: str
    census: Census
    pods_seen: bool
    failure: Failure | None
    deployment: Manifest | None
    hpa: Manifest | None


def assess(observed: Observed, revision: str, blocker: Failure | None, now: datetime) -> Situation:
    """Bring together what was observed of a service that exists, and what hinders its reconciliation.

    Reads the specification leniently: a status is owed to an invalid one too.
    """
    assert observed.service is not None
    spec = observed.service.get("spec") or {}
    children = {child["kind"]: child for child in observed.children}
    # The pods of somebody else's Deployment are theirs, whatever its name and their labels.
    owner = children.get("Deployment")
    pods = observed.pods if owner is None or is_ours(owner, observed.service["metadata"]["uid"]) else ()
    census = take_census(pods, revision, now)
    deployment = _answering(children.get("Deployment"), revision)
    startup_seconds = _number(spec.get("startupSeconds"), 1800)
    replicas = _number(spec.get("replicas"), 1)
    return Situation(
        replicas=replicas,
        autoscaling=bool(spec.get("autoscaling")),
        revision=revision,
        census=census,
        pods_seen="pods" not in observed.unseen,
        failure=blocker
        or _pod_failure(census, replicas, startup_seconds, observed)
        or _refused_pods(deployment)
        or _unseen_events(observed),
        deployment=deployment,
        hpa=children.get("HorizontalPodAutoscaler"),
    )


def compute_conditions(situation: Situation) -> tuple[Condition, ...]:
    """The conditions, in the order in which they are read."""
    return (_ready(situation), _progressing(situation), _degraded(situation), _scaling_ready(situation))


def render_status(
    service: Manifest, situation: Situation, fresh: tuple[Condition, ...], load: Load, now: datetime
) -> Manifest:
    """The whole status; equal to the stored one when nothing has changed."""
    key = Key(service["metadata"]["namespace"], service["metadata"]["name"])
    generation = service["metadata"].get("generation", 0)
    previous = service.get("status", {}).get("conditions", ())
    status: Manifest = {
        "observedGeneration": generation,
        **_counts(service, situation),
        "selector": names.selector_string(key.name),
        "url": names.service_url(key.namespace, key.name),
        "conditions": c.settle(previous, fresh, generation, now),
    }
    if situation.revision:
        status["revision"] = situation.revision
    if load.queue_depth is not None:
        status["queueDepth"] = load.queue_depth
    if load.ttft_p95 is not None:
        status["ttftP95"] = round(load.ttft_p95, _TTFT_DIGITS)
    return status


def _counts(service: Manifest, situation: Situation) -> dict[str, int]:
    """Of pods; as they were last seen where they are not. An HPA, which reads `replicas`, would act on a zero."""
    if situation.pods_seen:
        return {"replicas": len(situation.census.active), "readyReplicas": len(situation.census.ready)}
    stored = service.get("status", {})
    return {count: stored.get(count, 0) for count in ("replicas", "readyReplicas")}


# --- What fails -------------------------------------------------------------------------------------------------------


def _pod_failure(census: Census, replicas: int, startup_seconds: int, observed: Observed) -> Failure | None:
    for pod in census.unready:
        if census.leaving and is_waiting_for_room(pod):
            continue  # it takes the place of one that drains: the scheduler looks again when that one has gone
        if failure := failure_of(pod, startup_seconds, observed.events):
            return failure
    lost = census.unreplaced if len(census.ready) < replicas else None
    return failure_of(lost, startup_seconds) if lost else None


def _answering(deployment: Manifest | None, revision: str) -> Manifest | None:
    """The Deployment, unless its status is about an earlier one: it is changed in this pass, or was just before it."""
    if deployment is None or labelled_revision(deployment["spec"]["template"]) != revision:
        return None
    seen = deployment.get("status", {}).get("observedGeneration", 0)
    return deployment if seen >= deployment["metadata"].get("generation", 0) else None


def _refused_pods(deployment: Manifest | None) -> Failure | None:
    """The API server's refusal of the Deployment's pods, such as an exhausted quota."""
    condition = condition_of(deployment or {}, "ReplicaFailure")
    if condition.get("status") != "True":
        return None
    return Failure(c.PODS_REFUSED, condition.get("message", "pods are refused"))


def _unseen_events(observed: Observed) -> Failure | None:
    """That the events about a pod that waits silently may not be read: nothing else tells what it waits for."""
    refusal = observed.unseen.get("events")
    return forbidden([refusal]) if refusal else None


# --- Conditions -------------------------------------------------------------------------------------------------------


def _ready(situation: Situation) -> Condition:
    ready, wanted, failure = len(situation.census.ready), situation.replicas, situation.failure
    count = f"{ready} of {wanted} replicas ready"
    if ready and failure:
        message = f"{count}; {failure.reason}: {failure.message}"
        return Condition(ConditionType.READY, Truth.TRUE, c.SERVING_DEGRADED, message)
    if ready:
        return Condition(ConditionType.READY, Truth.TRUE, c.SERVING, count)
    if failure:
        truth = Truth.FALSE if situation.pods_seen else Truth.UNKNOWN
        return Condition(ConditionType.READY, truth, failure.reason, failure.message)
    if not wanted:
        return Condition(ConditionType.READY, Truth.FALSE, c.SCALED_TO_ZERO, "spec.replicas is 0")
    reason, message = _start_of(situation.census)
    return Condition(ConditionType.READY, Truth.FALSE, reason, f"{count}; {message}")


def _start_of(census: Census) -> tuple[str, str]:
    """How far the pods have come while none of them serves and none fails."""
    if not census.current:
        return c.CREATING_PODS, "pods are being created"
    if any(has_started(pod) for pod in census.current):
        return c.NOT_READY, "the server was ready and is not now: it drains, or its engine restarts"
    if any(was_drained(pod) for pod in census.current):
        return c.DRAINED, "POST /drain has ended the server, which is started again"
    if any(is_running(pod) for pod in census.current):
        return c.LOADING, "the server loads its model"
    return c.STARTING, "pods wait for a node, an image or a volume"


def _progressing(situation: Situation) -> Condition:
    census, wanted, failure = situation.census, situation.replicas, situation.failure
    old = len(census.active) - len(census.current)
    count = f"{census.ready_current} of {wanted} replicas of revision {situation.revision} ready"
    if not old and len(census.current) == wanted == census.ready_current and not failure:
        return Condition(ConditionType.PROGRESSING, Truth.FALSE, c.UP_TO_DATE, count)
    if failure:
        return Condition(ConditionType.PROGRESSING, Truth.FALSE, failure.reason, failure.message)
    stuck = condition_of(situation.deployment or {}, "Progressing")
    if stuck.get("status") == "False":
        reason = stuck.get("reason", c.PROGRESS_DEADLINE_EXCEEDED)
        return Condition(ConditionType.PROGRESSING, Truth.FALSE, reason, stuck.get("message", count))
    if old:
        return Condition(ConditionType.PROGRESSING, Truth.TRUE, c.ROLLING_OUT, f"{count}; {old} older still run")
    if census.ready and len(census.current) != wanted:
        return Condition(ConditionType.PROGRESSING, Truth.TRUE, c.SCALING, count)
    reason, message = _start_of(census) if not census.ready else (c.SCALING, "more replicas are starting")
    return Condition(ConditionType.PROGRESSING, Truth.TRUE, reason, f"{count}; {message}")


def _degraded(situation: Situation) -> Condition:
    if failure := situation.failure:
        return Condition(ConditionType.DEGRADED, Truth.TRUE, failure.reason, failure.message)
    return Condition(ConditionType.DEGRADED, Truth.FALSE, c.AS_EXPECTED, "nothing fails")


def _scaling_ready(situation: Situation) -> Condition:
    if not situation.autoscaling:
        message = "spec.autoscaling is not set: spec.replicas is up to you"
        return Condition(ConditionType.SCALING_READY, Truth.FALSE, c.AUTOSCALING_OFF, message)
    able, active = (condition_of(situation.hpa or {}, kind) for kind in ("AbleToScale", "ScalingActive"))
    telling = active if able.get("status") == "True" else able
    if not telling:
        message = "the HorizontalPodAutoscaler has not reported yet"
        return Condition(ConditionType.SCALING_READY, Truth.UNKNOWN, c.WAITING_FOR_HPA, message)
    truth = Truth(telling["status"])
    return Condition(ConditionType.SCALING_READY, truth, telling["reason"], telling.get("message", ""))


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise
