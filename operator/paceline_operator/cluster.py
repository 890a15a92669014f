"""The seam between what should be and where it runs: one protocol of two methods, and the values that cross it.

`reconcile` decides on these values without I/O. `kube.KubeCluster` carries the plans to an API server,
`local` carries them to processes of this machine, `testing.FakeCluster` keeps them in dictionaries.

Objects are in Kubernetes' own JSON shape on purpose: every implementation, test and reader already knows it, and
conditions are computed from the same fields wherever a pod runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Manifest = dict[str, Any]
"""A Kubernetes object as JSON. Never changed after it has crossed the seam."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """An LLMService by namespace and name: the unit of work of the queue."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """`namespace/name`, as kubectl users write it."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Load:
    """What the ready pods of a service report of themselves. `None` is unknown (nothing answered), never zero."""

    queue_depth: int | None = None  # requests waiting + running, over all replicas
    ttft_p95: float | None = None  # seconds, over the scrape window; None too when nothing was served in it


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that is known of one service at one moment.

    service: the LLMService with its metadata, spec and status; None when it does not exist (any more).
    children: objects that have the name and kind of a child (`names.child_name`), ours or not: Deployment (with status,
        where the cluster keeps one), Service, PodDisruptionBudget, HorizontalPodAutoscaler (with status.conditions);
        and the ConfigMaps that carry the service's labels, of its current configuration and of earlier ones.
    replica_sets: those that the Deployment has made, where the cluster makes pods by such.
    pods: the service's pods of all revisions, terminating ones too, each with `metadata.labels` of its template,
        `metadata.creationTimestamp`, `metadata.deletionTimestamp` while it drains, `status.phase`, `status.conditions`
        (PodScheduled, Ready), `status.containerStatuses` (name, ready, started, restartCount, state, lastState).
    events: what was told (core/v1) of pods whose status does not tell all: those that wait for something, such as a
        volume, or were killed. Warnings, and the Normal ones that tell that a pod got further or is being ended.
    load: what the pods report; implementations refresh it at most every 15 s, since it ends in status.
    unseen: of which of these nothing is known because they may not be read, by resource ("pods", "deployments", …), and
        in the API server's words, which name verb, resource and namespace.
    """

    service: Manifest | None
    children: tuple[Manifest, ...] = ()
    replica_sets: tuple[Manifest, ...] = ()
    pods: tuple[Manifest, ...] = ()
    events: tuple[Manifest, ...] = ()
    load: Load = field(default_factory=Load)
    unseen: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Apply:
    """Make this object so: create it, or set these fields and drop those that we set before and no longer name.

    uid: of the existing object that was observed; None to create. An object that was swapped meanwhile is left alone
    (StaleObservation).
    """

    manifest: Manifest
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove this child, if it still has this uid. Gone already counts as done."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """Replace the whole status of the LLMService that has this uid.

    version: the `metadata.resourceVersion` that the status was computed from; where the cluster has versions, a service
        that has another one by now keeps its status (StaleObservation).
    """

    uid: str
    status: Manifest
    version: str | None = None


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Tell the user of a transition, as a core/v1 Event about the LLMService."""

    uid: str
    type: str  # "Normal" or "Warning"
    reason: str
    message: str


Action = Apply | Delete | PatchStatus | EmitEvent


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions in the order in which they are carried out; the first that fails ends the execution."""

    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None  # seconds after which to look again although nothing may happen; None: no need


class Cluster(Protocol):
    """Where services run. All of the operator's I/O on services goes through these two methods."""

    async def observe(self, key: Key) -> Observed:
        """Read the service, its children and its pods as they are now. Raises ClusterUnavailable."""
        ...

    async def execute(self, key: Key, plan: Plan) -> None:
        """Carry out the plan's actions in order.

        Raises ChildRefused when a child is not accepted or not let go, StaleObservation when an object was swapped
        meanwhile, and ClusterUnavailable.
        """
        ...
