"""A cluster in dictionaries, and the objects that tests put into it: the third implementation of the seam."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

from paceline_operator import names
from paceline_operator.cluster import (
    Action,
    Apply,
    Delete,
    EmitEvent,
    Key,
    Load,
    Manifest,
    Observed,
    PatchStatus,
    Plan,
)
from paceline_operator.errors import ChildRefused, StaleObservation

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
"""A moment for tests that need one."""


def llmservice(name: str = "smollm2", namespace: str = "default", **spec: Any) -> Manifest:
    """An LLMService as the API server stores one; on the CPU unless `resources` says otherwise."""
    defaults = {"model": "hf://HuggingFaceTB/SmolLM2-135M-Instruct", "resources": {"limits": {"cpu": "2"}}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-of-{name}", "generation": 1},
        "spec": {**defaults, **spec},
    }


def make_pod(deployment: Manifest, name: str = "pod-0", *, ready: bool = False, **container: Any) -> Manifest:
    """A pod of this Deployment. `container` sets fields of the server's container status (state, lastState, …)."""
    template = deployment["spec"]["template"]
    status = {"name": names.CONTAINER, "ready": ready, "started": ready, "restartCount": 0, "state": {"running": {}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": deployment["metadata"]["namespace"],
            "uid": f"uid-of-{name}",
            "labels": dict(template["metadata"]["labels"]),
            "creationTimestamp": "2026-01-02T03:04:05Z",
        },
        "spec": template["spec"],
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{**status, **container}],
        },
    }


class FakeCluster:
    """Carries plans out on dictionaries as an API server would, and remembers them.

    Tests change `services`, `replica_sets`, `pods`, `events` and `load` as users, kubelets and schedulers do.
    """

    def __init__(self, *services: Manifest) -> None:
        self.services: dict[Key, Manifest] = {key_of(service): service for service in services}
        self.children: dict[tuple[Key, str, str], Manifest] = {}  # by kind and name
        self.replica_sets: list[Manifest] = []
        self.pods: dict[Key, list[Manifest]] = {}
        self.events: list[Manifest] = []
        self.load = Load()
        self.refusals: dict[str, str] = {}  # kind → why the API server refuses it
        self.unseen: dict[str, str] = {}  # resource → why the API server does not show it
        self.executed: list[Action] = []
        self._uids = 0

    async def observe(self, key: Key) -> Observed:
        """Everything of this key, as copies."""
        observed = Observed(
            service=self.services.get(key),
            children=tuple(
                child
                for (owner, kind, _), child in self.children.items()
                if owner == key and f"{kind.lower()}s" not in self.unseen
            ),
            replica_sets=() if "replicasets" in self.unseen else tuple(self.replica_sets),
            pods=() if "pods" in self.unseen else tuple(self.pods.get(key, ())),
            events=() if "events" in self.unseen else tuple(self.events),
            load=self.load,
            unseen=self.unseen,
        )
        return copy.deepcopy(observed)

    async def execute(self, key: Key, plan: Plan) -> None:
        """Carry the plan out, action by action."""
        for action in plan.actions:
            match action:
                case Apply(manifest, uid):
                    self._apply(key, manifest, uid)
                case Delete(kind=kind, name=name):
                    self.children.pop((key, kind, name), None)
                case PatchStatus(status=status):
                    self.services[key]["status"] = copy.deepcopy(status)
                case EmitEvent():
                    pass
            self.executed.append(action)

    def child(self, key: Key, kind: str) -> Manifest:
        """The one child of this kind, as stored."""
        (found,) = (child for (owner, its_kind, _), child in self.children.items() if (owner, its_kind) == (key, kind))
        return found

    def take_actions(self) -> list[Action]:
        """What was executed since the last call."""
        actions, self.executed = self.executed, []
        return actions

    def _apply(self, key: Key, manifest: Manifest, uid: str | None) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if reason := self.refusals.get(kind):
            raise ChildRefused(kind, name, reason)
        known = self.children.get((key, kind, name))
        if (known["metadata"]["uid"] if known else None) != uid:
            raise StaleObservation(f"{kind} {name} is another one")
        if uid is None:
            self._uids += 1
            uid = f"uid-{self._uids}"
        stored = copy.deepcopy(manifest)
        stored["metadata"]["uid"] = uid
        if known and "status" in known:
            stored["status"] = known["status"]
        self.children[key, kind, name] = stored


def key_of(manifest: Manifest) -> Key:
    """Namespace and name of an object."""
    return Key(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
