"""What keeps a pod from serving, in the pod's own words. Pure; called by `status` for pods that are not ready.

A pod says it in one of these places, looked at in this order: its phase (evicted), its containers (waiting, terminated,
the last termination), its conditions (not scheduled, cut off), the events about it (a volume that does not mount).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from paceline_operator import conditions, names
from paceline_operator.cluster import Manifest
from paceline_operator.failure import Failure
from paceline_operator.ownership import is_alive
from paceline_operator.pods import container_statuses, event_time, has_ended, hindrance, is_cut_off, unscheduled
from paceline_operator.terminations import SIGKILLED, Record, termination

_BACK_OFF: Final = "CrashLoopBackOff"  # the waiting reason that says nothing itself: the last termination does
_IMAGE_REASONS: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
# What the scheduler and the kubelet tell when a pod gets further: nothing that hindered it before does so any more.
_STEPS: Final = frozenset({"Scheduled", "Pulling", "Pulled", "Created", "Started"})
_MESSAGE_LIMIT: Final = 1000  # characters: a condition is read by people, the log has the rest


def failure_of(pod: Manifest, startup_seconds: int, events: Collection[Manifest] = ()) -> Failure | None:
    """Why this pod, which is not ready, does not get ready; None while nothing speaks against it."""
    failure = (
        _phase_failure(pod)
        or _container_failure(pod, startup_seconds, _about(pod, events))
        or _scheduling_failure(pod)
        or _node_failure(pod)
        or _warned_failure(pod, events)
    )
    if failure is None:
        return None
    message = " ".join(f"pod {pod['metadata']['name']}: {failure.message}".split())
    return Failure(failure.reason, message[:_MESSAGE_LIMIT])


def is_waiting_for_room(pod: Manifest) -> bool:
    """Whether what keeps the pod from a node is that others hold what it asks for, such as a GPU."""
    return "Insufficient " in unscheduled(pod).get("message", "")


def is_waiting_silently(pod: Manifest) -> bool:
    """Whether the pod waits for something that only events tell, such as a volume or a sandbox."""
    return any("waiting" in one.get("state", {}) and not hindrance(one) for one in container_statuses(pod))


def needs_events(pod: Manifest) -> bool:
    """Whether only events tell all of what keeps the pod from serving: what it waits for, or who has killed it.

    Never of a pod that is to serve no more: the record of one that was evicted stays for days.
    """
    if has_ended(pod) or not is_alive(pod):
        return False
    return is_waiting_silently(pod) or any(
        state.get("terminated", {}).get("exitCode") == SIGKILLED
        for container in container_statuses(pod)
        if not _has_come_up(container)
        for state in (container.get("state", {}), container.get("lastState", {}))
    )


def _container_failure(pod: Manifest, startup_seconds: int, about: Collection[Manifest]) -> Failure | None:
    for container in container_statuses(pod):
        failure = _one_container(container, Record.of(pod, container["name"], startup_seconds, about))
        if failure is None:
            continue
        if container["name"] == names.CONTAINER:
            return failure
        return Failure(failure.reason, f"container {container['name']}: {failure.message}")
    return None


def _one_container(container: dict[str, Any], record: Record) -> Failure | None:
    """What stands against a container now. How it ended before counts until it has come up again."""
    state, reason = container.get("state", {}), hindrance(container)
    if reason and reason != _BACK_OFF:
        return _waiting(reason, state["waiting"])
    if ended := state.get("terminated"):
        is_done = container["name"] != names.CONTAINER and not ended.get("exitCode")
        return None if is_done else termination(ended, record)
    last = container.get("lastState", {}).get("terminated")
    if last and not _has_come_up(container):
        return termination(last, record)
    return Failure(conditions.CRASHED, state["waiting"].get("message", "")) if reason and not last else None


def _has_come_up(container: dict[str, Any]) -> bool:
    """Whether the container serves, or has served since its last start.

    Only of the server `started` tells that: a container without a startup probe has started as soon as it runs.
    """
    return bool(container.get("ready") or (container["name"] == names.CONTAINER and container.get("started")))


def _waiting(reason: str, waiting: dict[str, Any]) -> Failure:
    """A container that was never started: no image, no secret, no permission."""
    if reason in _IMAGE_REASONS:
        reason = conditions.IMAGE_PULL_BACK_OFF
    return Failure(reason, waiting.get("message") or reason)


def _scheduling_failure(pod: Manifest) -> Failure | None:
    condition = unscheduled(pod)
    if not condition:
        return None
    message = condition.get("message", "")
    wants_gpu = f"Insufficient {names.GPU_RESOURCE_PREFIX}" in message
    reason = conditions.NO_SPARE_GPU if wants_gpu else conditions.UNSCHEDULABLE
    return Failure(reason, message or "no node takes the pod")


def _node_failure(pod: Manifest) -> Failure | None:
    if not is_cut_off(pod):
        return None
    node = pod["spec"].get("nodeName", "")
    return Failure(conditions.NODE_NOT_READY, f"its node {node} does not report any more; it gets no requests")


def _phase_failure(pod: Manifest) -> Failure | None:
    """Why the whole pod was ended, which is also why its containers have ended."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return None
    return Failure(status.get("reason", "PodFailed"), status.get("message", "the pod failed"))


def _warned_failure(pod: Manifest, events: Collection[Manifest]) -> Failure | None:
    """The latest warning since its last step about a pod whose containers wait without saying for what."""
    if not is_waiting_silently(pod):
        return None
    about = _about(pod, events)
    step = max((event_time(event) for event in about if event.get("reason") in _STEPS), default="")
    warnings = (event for event in about if event.get("type") == "Warning" and event_time(event) > step)
    latest = max(warnings, key=event_time, default=None)
    if latest is None:
        return None
    reason = latest.get("reason") or "Warning"  # whoever writes an event may leave out either
    return Failure(reason, latest.get("message") or reason)


def _about(pod: Manifest, events: Collection[Manifest]) -> list[Manifest]:
    return [event for event in events if event["involvedObject"].get("uid") == pod["metadata"]["uid"]]
