"""The Deployment controller of local mode: which pods to make and which to delete.

`plan` is pure and follows the rules of Kubernetes' rolling update (pkg/controller/deployment/rolling.go): never more
than replicas + maxSurge pods, never fewer than replicas - maxUnavailable available ones, unready pods of the old
template go first. A pod that terminates no longer counts. `LocalCluster` calls it at every change.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_operator.cluster import Manifest
from paceline_operator.ownership import is_alive
from paceline_operator.pods import is_ready

TEMPLATE_HASH = "pod-template-hash"
"""The label by which Kubernetes tells the pods of one template from those of another."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""The annotation that orders pods for deletion: lower goes first."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Pods to create from the current template, and names of pods to delete."""

    create: int = 0
    delete: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Limits:
    replicas: int
    surge: int
    unavailable: int


def template_hash(deployment: Manifest) -> str:
    """A label-safe hash of the pod template."""
    text = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def plan(deployment: Manifest, pods: Sequence[Manifest]) -> Changes:
    """Decide the next step towards `replicas` pods of the current template.

    Args:
        deployment: as stored.
        pods: all pods that its selector finds, oldest first.
    """
    current = template_hash(deployment)
    living = [pod for pod in pods if is_alive(pod)]
    new = [pod for pod in living if pod["metadata"]["labels"].get(TEMPLATE_HASH) == current]
    old = [pod for pod in living if pod["metadata"]["labels"].get(TEMPLATE_HASH) != current]
    replicas = deployment["spec"].get("replicas", 1)
    if deployment["spec"].get("strategy", {}).get("type") == "Recreate":
        return _recreate(replicas, new, old, terminating=len(pods) > len(living))
    return _roll(_limits(deployment, replicas), new, old)


def _recreate(replicas: int, new: list[Manifest], old: list[Manifest], *, terminating: bool) -> Changes:
    if old:
        return Changes(delete=_names(old))
    if terminating and not new:
        return Changes()
    return _resize(replicas, new)


def _resize(replicas: int, new: list[Manifest]) -> Changes:
    if len(new) <= replicas:
        return Changes(create=replicas - len(new))
    return Changes(delete=_names(_first_to_go(new)[: len(new) - replicas]))


def _roll(limits: _Limits, new: list[Manifest], old: list[Manifest]) -> Changes:
    if len(new) > limits.replicas:
        return _resize(limits.replicas, new)
    room = limits.replicas + limits.surge - len(new) - len(old)
    create = max(0, min(limits.replicas - len(new), room))
    return Changes(create, _names(_old_to_go(limits, new, old)))


def _old_to_go(limits: _Limits, new: list[Manifest], old: list[Manifest]) -> list[Manifest]:
    """Old pods whose end leaves enough available: unready ones first, they serve nobody."""
    must_stay = limits.replicas - limits.unavailable
    unready_new = sum(not is_ready(pod) for pod in new)
    spare = len(new) + len(old) - must_stay - unready_new
    unready = [pod for pod in old if not is_ready(pod)][: max(0, spare)]
    ready = [pod for pod in old if is_ready(pod)]
    available = len(ready) + len(new) - unready_new
    return unready + _first_to_go(ready)[: max(0, available - must_stay)]


def _first_to_go(pods: list[Manifest]) -> list[Manifest]:
    """Kubernetes' order of deletion: unready first, then lower deletion cost, then younger."""
    younger_first = reversed(pods)
    return sorted(younger_first, key=lambda pod: (is_ready(pod), _deletion_cost(pod)))


def _deletion_cost(pod: Manifest) -> int:
    return int(pod["metadata"].get("annotations", {}).get(DELETION_COST, "0"))


def _limits(deployment: Manifest, replicas: int) -> _Limits:
    rolling = deployment["spec"].get("strategy", {}).get("rollingUpdate") or {}
    surge = math.ceil(_share(rolling.get("maxSurge", "25%"), replicas))
    unavailable = math.floor(_share(rolling.get("maxUnavailable", "25%"), replicas))
    if surge == 0 and unavailable == 0:
        unavailable = 1  # both percentages rounded to nothing: Kubernetes' way out of the standstill
    return _Limits(replicas, surge, min(unavailable, replicas))


def _share(value: int | str, replicas: int) -> float:
    return int(value[:-1]) * replicas / 100 if isinstance(value, str) else value


def _names(pods: Sequence[Manifest]) -> tuple[str, ...]:
    return tuple(pod["metadata"]["name"] for pod in pods)


def make_pod(deployment: Manifest) -> Manifest:
    """A new pod of the current template."""
    template, name, hashed = deployment["spec"]["template"], deployment["metadata"]["name"], template_hash(deployment)
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": deployment["metadata"]["uid"]}
    metadata = template.get("metadata", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata
        | {
            "name": f"{name}-{hashed}-{secrets.token_hex(3)[:5]}",
            "namespace": deployment["metadata"]["namespace"],
            "labels": metadata.get("labels", {}) | {TEMPLATE_HASH: hashed},
            "ownerReferences": [owner | {"controller": True}],
        },
        "spec": template["spec"],
        "status": {"phase": "Pending"},
    }


def status(deployment: Manifest, pods: Sequence[Manifest]) -> Manifest:
    """The Deployment's status, from its pods."""
    living = [pod for pod in pods if is_alive(pod)]
    updated = [pod for pod in living if pod["metadata"]["labels"].get(TEMPLATE_HASH) == template_hash(deployment)]
    ready = sum(is_ready(pod) for pod in living)
    wanted = deployment["spec"].get("replicas", 1)
    return {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": len(living),
        "updatedReplicas": len(updated),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "unavailableReplicas": max(0, wanted - ready),
    }
