"""Local mode as a `Cluster`: the operator's reconciler reads and acts here as it does on an API server.

`LocalCluster` is the seam over a store; `LoadSource` shows the same store to the adapter's collector. Both are used by
`plane`, which runs the controllers beside them.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline_operator import names
from paceline_operator.adapter.discover import POD_SELECTOR, PODS_PATH, SERVICES_PATH, service_path
from paceline_operator.cluster import Action, Apply, Delete, EmitEvent, Key, Load, Manifest, Observed, PatchStatus, Plan
from paceline_operator.errors import ChildRefused, StaleObservation
from paceline_operator.local.store import Store

# Nobody evicts pods here: the budget is kept, so that the reconciler finds what it made, and means nothing.
_CHILD_KINDS = ("ConfigMap", "Service", "Deployment", "PodDisruptionBudget", "HorizontalPodAutoscaler")


class LocalCluster:
    """The `Cluster` of local mode.

    Args:
        store: the objects, one LLMService and what belongs to it.
        read_load: what the pods of a service last reported.
        on_event: told of every transition.
    """

    def __init__(self, store: Store, read_load: Callable[[Key], Load], on_event: Callable[[EmitEvent], None]) -> None:
        self._store = store
        self._read_load = read_load
        self._on_event = on_event

    async def observe(self, key: Key) -> Observed:
        """Read the service, its children, its pods and the events about them."""
        ours = names.selector_labels(key.name)
        return Observed(
            service=self._store.get(names.KIND, key.name),
            children=tuple(child for kind in _CHILD_KINDS for child in self._store.list(kind, ours)),
            pods=self._store.list("Pod", ours),
            events=self._store.list("Event"),
            load=self._read_load(key),
        )

    async def execute(self, key: Key, plan: Plan) -> None:
        """Carry out the plan. Raises StaleObservation, and ChildRefused for a kind that means nothing here."""
        for action in plan.actions:
            self._execute(key, action)

    def _execute(self, key: Key, action: Action) -> None:
        match action:
            case Apply(manifest, uid):
                if manifest["kind"] not in _CHILD_KINDS:
                    raise ChildRefused(manifest["kind"], manifest["metadata"]["name"], "local mode has no such objects")
                self._store.apply(manifest, uid)
            case Delete(_, kind, name, uid):
                existing = self._store.get(kind, name)
                if existing is not None and existing["metadata"]["uid"] == uid:
                    self._store.remove(kind, name)
            case PatchStatus(uid, status):
                service = self._store.get(names.KIND, key.name)
                if service is None or service["metadata"]["uid"] != uid:
                    raise StaleObservation(f"{names.KIND} {key} was replaced meanwhile")
                self._store.set_status(names.KIND, key.name, status)
            case EmitEvent():
                self._on_event(action)


class LoadSource:
    """The adapter's `ObjectSource`, as far as its collector reads it: the service and its pods."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list_objects(self, path: str, label_selector: str | None = None) -> list[Manifest]:
        """The collection at one of the two paths that the collector asks for."""
        if path == SERVICES_PATH:
            return list(self._store.list(names.KIND))
        assert (path, label_selector) == (PODS_PATH, POD_SELECTOR)
        labels = dict(pair.split("=", 1) for pair in POD_SELECTOR.split(","))
        return list(self._store.list("Pod", labels))

    async def read_object(self, path: str) -> Manifest | None:
        """A service by its path."""
        services = await self.list_objects(SERVICES_PATH)
        found = (service for service in services if path == service_path(key_of(service)))
        return next(found, None)

    async def patch_object(self, path: str, patch: Manifest) -> Manifest | None:
        """The collector changes nothing."""
        raise AssertionError(f"{path} is not for the collector to change")


def key_of(service: Manifest) -> Key:
    """The key of an LLMService."""
    return Key(service["metadata"]["namespace"], service["metadata"]["name"])
