"""What the status of a pod tells of it; and the pods of a service, counted: which serve, which are of one revision.

Pure. Read here by all who look at pods: `status`, `failures`, the adapter and local mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.conditions import DRAINED
from paceline_operator.ownership import is_alive

_ENDED_PHASES: Final = ("Succeeded", "Failed")
# Beyond the deletionTimestamp, by which a pod that was told to end has ended: time for the kubelet to say
# so. It never does where its node is lost.
_LEAVING_MARGIN: Final = timedelta(seconds=30)
_PASSING_REASONS: Final = frozenset({"ContainerCreating", "PodInitializing"})  # waiting reasons that pass by themselves


@dataclass(frozen=True, slots=True)
class Census:
    """The service's pods at one moment, counted without those that are on their way out."""

    active: tuple[Manifest, ...]  # neither ended nor told to end
    ready: tuple[Manifest, ...]  # of the active ones
    current: tuple[Manifest, ...]  # active and of the current revision
    lost: tuple[Manifest, ...]  # of the current revision, ended without being told to: evicted, failed
    leaving: bool  # whether some were told to end and have time to: until then they hold what they have

    @property
    def unready(self) -> tuple[Manifest, ...]:
        """Pods that should serve and do not. Those of older revisions tell nothing of the current one."""
        return tuple(pod for pod in self.current if pod not in self.ready)

    @property
    def unreplaced(self) -> Manifest | None:
        """The pod that was lost last, while none that was made since then serves: its record stays for days."""
        last = max(self.lost, key=ended_at, default=None)
        if last is None or any(_created_at(pod) >= ended_at(last) for pod in self.ready):
            return None
        return last

    @property
    def ready_current(self) -> int:
        """How many pods of the current revision serve."""
        return sum(pod in self.ready for pod in self.current)


def take_census(pods: tuple[Manifest, ...], revision: str, now: datetime) -> Census:
    """Count `pods` against `revision`."""
    staying = sorted(filter(is_alive, pods), key=_age)
    active = tuple(pod for pod in staying if not has_ended(pod))
    return Census(
        active=active,
        ready=tuple(pod for pod in active if is_ready(pod)),
        current=tuple(pod for pod in active if labelled_revision(pod) == revision),
        lost=tuple(pod for pod in staying if _phase(pod) == "Failed" and labelled_revision(pod) == revision),
        leaving=any(_is_leaving(pod, now) for pod in pods),
    )


def labelled_revision(labelled: Manifest) -> str | None:
    """The revision of a pod, or of a pod template."""
    revision: str | None = labelled["metadata"].get("labels", {}).get(names.LABEL_REVISION)
    return revision


def has_ended(pod: Manifest) -> bool:
    """Whether the pod is only a record: evicted or failed, its containers have ended and are not started again."""
    return _phase(pod) in _ENDED_PHASES


def ended_at(pod: Manifest) -> str:
    """When a pod that has ended did so: its last change, as far as its status tells, and its creation otherwise."""
    changes = (condition.get("lastTransitionTime") or "" for condition in pod.get("status", {}).get("conditions", ()))
    return max([_created_at(pod), *changes])


def is_placed(pod: Manifest) -> bool:
    """Whether the pod has a node. One that nobody has looked at yet is neither placed nor `unscheduled`."""
    return condition_of(pod, "PodScheduled").get("status") == "True"


def unscheduled(pod: Manifest) -> Manifest:
    """The condition that says why no node takes the pod; empty where one does, or nobody has looked yet."""
    condition = condition_of(pod, "PodScheduled")
    return condition if condition.get("status") == "False" else {}


def is_ready(pod: Manifest) -> bool:
    """Whether the pod's Ready condition is true: then requests are sent to it."""
    return condition_of(pod, "Ready").get("status") == "True"


def is_cut_off(pod: Manifest) -> bool:
    """Whether the pod's node does not report any more.

    The node controller then sets Ready to false without a reason, and leaves what the kubelet said last as it is.
    Source: MarkPodsNotReady in pkg/controller/util/node of Kubernetes.
    """
    ready, containers = condition_of(pod, "Ready"), condition_of(pod, "ContainersReady")
    return (ready.get("status"), containers.get("status")) == ("False", "True") and not ready.get("reason")


def ready_changed_at(pod: Manifest) -> str:
    """When the pod last became ready or ceased to be, as Kubernetes writes times; empty where that is not told."""
    return str(condition_of(pod, "Ready").get("lastTransitionTime") or "")


def is_running(pod: Manifest) -> bool:
    """Whether the server's process runs, whatever it does."""
    return any("running" in status.get("state", {}) for status in _server_statuses(pod))


def has_started(pod: Manifest) -> bool:
    """Whether the server was ready once since its last start."""
    return any(status.get("started") for status in _server_statuses(pod))


def was_drained(pod: Manifest) -> bool:
    """Whether the server has ended because POST /drain told it to, when it last ended: its last words say so."""
    states = (status.get(state, {}) for status in _server_statuses(pod) for state in ("state", "lastState"))
    return any(is_drain(state["terminated"]) for state in states if "terminated" in state)


def is_drain(ended: Manifest) -> bool:
    """Whether a termination of the server was a drain that it was asked for, and no failure."""
    return ended.get("exitCode") == 0 and str(ended.get("message", "")).startswith(f"{DRAINED}:")


def restart_count(pod: Manifest) -> int:
    """How often the server has been started again in this pod."""
    return sum(int(status["restartCount"]) for status in _server_statuses(pod))


def container_statuses(pod: Manifest) -> list[Manifest]:
    """Of all containers, those that prepare the pod first."""
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def hindrance(container: Manifest) -> str | None:
    """Why a container waits, by its status, where that does not pass by itself: CrashLoopBackOff, ErrImagePull, …."""
    reason: str = container.get("state", {}).get("waiting", {}).get("reason") or ""
    return None if not reason or reason in _PASSING_REASONS else reason


def condition_of(manifest: Manifest, kind: str) -> Manifest:
    """The object's condition of this type, a pod's mostly; empty where it has none."""
    conditions = manifest.get("status", {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})


def event_time(event: Manifest) -> str:
    """When an event was told last, as Kubernetes writes times."""
    created = event["metadata"].get("creationTimestamp")
    return event.get("lastTimestamp") or event.get("eventTime") or created or ""


def _is_leaving(pod: Manifest, now: datetime) -> bool:
    if is_alive(pod) or has_ended(pod):
        return False
    return now <= datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]) + _LEAVING_MARGIN


def _server_statuses(pod: Manifest) -> list[Manifest]:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return [status for status in statuses if status["name"] == names.CONTAINER]


def _phase(pod: Manifest) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _age(pod: Manifest) -> tuple[str, str]:
    return _created_at(pod), str(pod["metadata"]["name"])


def _created_at(pod: Manifest) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))
