"""What keeps a pod from serving, in the pod's own words. Pure; called by `status` for pods that are not ready.

A pod says it in one of these places, looked at in this order: its phase (evicted), its containers (waiting, terminated,
the last termination), its conditions (not scheduled, cut off), the events about it (a volume that does not mount).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from paceline_operator import conditions, names
from paceline_operator.cluster import Manifest
from paceline_operator.pods import container_statuses, hindrance, is_cut_off, is_drain, ready_changed_at, unscheduled
from paceline_operator.vocabulary import in_words_of_the_spec

# The server's last words: a reason in CamelCase (of several words, so that a log line's `INFO:` is none), a colon, a
# message of one line or more.
_LAST_WORDS: Final = re.compile(
    r"(?P<reason>(?=[A-Z0-9]*[a-z])[A-Z][a-z0-9]*([A-Z][a-z0-9]*)+): (?P<message>.+)", re.DOTALL
)
_BACK_OFF: Final = "CrashLoopBackOff"  # the waiting reason that says nothing itself: the last termination does
_SIGKILLED: Final = 137
_ENDED: Final = (0, 143, _SIGKILLED)  # exit codes after the kubelet's SIGTERM: of a server that heeds it, and of others
_KILL: Final = (
    "the server was killed (SIGKILL, exit code 137), neither by a probe nor at a memory limit of its own: its node may "
    "be out of memory, as the kernel's log tells, or somebody has ended it"
)
_IMAGE_REASONS: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
# What the scheduler and the kubelet tell when a pod gets further: nothing that hindered it before does so any more.
_STEPS: Final = frozenset({"Scheduled", "Pulling", "Pulled", "Created", "Started"})
_MESSAGE_LIMIT: Final = 1000  # characters: a condition is read by people, the log has the rest


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something does not work: a machine-readable reason and a message for people."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class _Record:
    """What tells the ends of a server apart that have the same exit code. Times as Kubernetes writes them.

    budget_seconds: how long a start may take.
    ready_changed: when the pod last became ready or ceased to be.
    last_told: when something was last told of the pod in an event; empty where nothing was.
    probe_kills: when the kubelet told that it ends the server because of a probe.
    """

    budget_seconds: int
    ready_changed: str
    last_told: str
    probe_kills: tuple[str, ...]

    def timed_out(self, ended: dict[str, Any]) -> bool:
        """Whether this run took its whole budget and was never ready."""
        seconds = _seconds(ended)
        return seconds is not None and seconds >= self.budget_seconds and self.ready_changed <= ended["startedAt"]

    def went_silent(self, ended: dict[str, Any]) -> bool:
        """Whether this run was ready, and then not any more for some time before its end."""
        return str(ended.get("startedAt", "")) < self.ready_changed < str(ended.get("finishedAt", ""))

    def by_probe(self, ended: dict[str, Any]) -> bool | None:
        """Whether the kubelet ended this run because of a probe; None where events do not reach to its end."""
        started, finished = ended.get("startedAt", ""), ended.get("finishedAt", "")
        if any(started <= moment <= finished for moment in self.probe_kills):
            return True
        return False if self.last_told >= started else None


def forbidden(refusals: Iterable[str]) -> Failure:
    """What the operator may not read, in the API server's words, and what to do."""
    remedy = "give the operator this right again: helm upgrade, or kubectl apply of its install.yaml, restores its role"
    return Failure(conditions.FORBIDDEN, f"{'; '.join(refusals)}; {remedy}")


def failure_of(pod: Manifest, startup_seconds: int, events: Collection[Manifest] = ()) -> Failure | None:
    """Why this pod, which is not ready, does not get ready; None while nothing speaks against it."""
    failure = (
        _phase_failure(pod)
        or _container_failure(pod, _record(pod, startup_seconds, events))
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
    """Whether only events tell all of what keeps the pod from serving: what it waits for, or who has killed it."""
    return is_waiting_silently(pod) or any(
        state.get("terminated", {}).get("exitCode") == _SIGKILLED
        for container in container_statuses(pod)
        if not _has_come_up(container)
        for state in (container.get("state", {}), container.get("lastState", {}))
    )


def _record(pod: Manifest, startup_seconds: int, events: Collection[Manifest]) -> _Record:
    about = _about(pod, events)
    kills = (one for one in about if one.get("reason") == "Killing" and "probe" in one.get("message", ""))
    return _Record(
        budget_seconds=startup_seconds,
        ready_changed=ready_changed_at(pod),
        last_told=max(map(_event_time, about), default=""),
        probe_kills=tuple(_event_time(one) for one in kills),
    )


def _container_failure(pod: Manifest, record: _Record) -> Failure | None:
    for container in container_statuses(pod):
        failure = _one_container(container, record)
        if failure is None:
            continue
        if container["name"] == names.CONTAINER:
            return failure
        return Failure(failure.reason, f"container {container['name']}: {failure.message}")
    return None


def _one_container(container: dict[str, Any], record: _Record) -> Failure | None:
    """What stands against a container now. How it ended before counts until it has come up again."""
    state, reason = container.get("state", {}), hindrance(container)
    if reason and reason != _BACK_OFF:
        return _waiting(reason, state["waiting"])
    if ended := state.get("terminated"):
        is_done = container["name"] != names.CONTAINER and not ended.get("exitCode")
        return None if is_done else _termination(ended, record)
    last = container.get("lastState", {}).get("terminated")
    if last and not _has_come_up(container):
        return _termination(last, record)
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


def _termination(ended: dict[str, Any], record: _Record) -> Failure | None:
    """A container that ended: by the kernel, with its own last words, or otherwise.

    None for one that was drained: it did what it was asked.
    """
    if is_drain(ended):
        return None
    code = ended.get("exitCode", 0)
    words = ended.get("message", "").strip()
    if ended.get("reason") == "OOMKilled":
        return Failure(conditions.OOM_KILLED, "the server was ended at its memory limit; raise resources.limits.memory")
    if code and (match := _LAST_WORDS.fullmatch(words)):
        return Failure(match["reason"], in_words_of_the_spec(match["message"]))
    if code in _ENDED and (failure := _ended_by_probe(ended, record)):
        return failure
    tail = words[-_MESSAGE_LIMIT // 2 :]
    last_lines = f": {tail}" if tail else ""
    if code == _SIGKILLED:
        return Failure(conditions.KILLED, f"{_KILL}{last_lines}")
    return Failure(conditions.CRASHED, f"the server ended with exit code {code}{last_lines}")


def _ended_by_probe(ended: dict[str, Any], record: _Record) -> Failure | None:
    """A server that the kubelet ended, as far as is known. A SIGKILL that nobody owns up to may be anybody's."""
    code, by_probe = ended.get("exitCode", 0), record.by_probe(ended)
    if code == _SIGKILLED and by_probe is False:
        return None
    if record.timed_out(ended):
        message = f"not ready within startupSeconds ({record.budget_seconds} s), restarted"
        return Failure(conditions.STARTUP_TIMEOUT, message)
    if code == 0 or by_probe or record.went_silent(ended):
        return Failure(conditions.RESTARTED, "the server stopped answering its probes and was restarted")
    return None


def _seconds(ended: dict[str, Any]) -> float | None:
    """How long a terminated container ran."""
    if not ended.get("startedAt") or not ended.get("finishedAt"):
        return None
    started, finished = (datetime.fromisoformat(ended[moment]) for moment in ("startedAt", "finishedAt"))
    return (finished - started).total_seconds()


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
    step = max((_event_time(event) for event in about if event.get("reason") in _STEPS), default="")
    warnings = (event for event in about if event.get("type") == "Warning" and _event_time(event) > step)
    latest = max(warnings, key=_event_time, default=None)
    if latest is None:
        return None
    reason = latest.get("reason") or "Warning"  # whoever writes an event may leave out either
    return Failure(reason, latest.get("message") or reason)


def _about(pod: Manifest, events: Collection[Manifest]) -> list[Manifest]:
    return [event for event in events if event["involvedObject"].get("uid") == pod["metadata"]["uid"]]


def _event_time(event: Manifest) -> str:
    created = event["metadata"].get("creationTimestamp")
    return event.get("lastTimestamp") or event.get("eventTime") or created or ""
