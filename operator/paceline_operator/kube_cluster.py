"""The `Cluster` seam on an API server: reads what is there, carries plans out by server-side apply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

from paceline_operator import metrics, names
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
from paceline_operator.conditions import timestamp
from paceline_operator.errors import ChildRefused, PacelineError, RequestRefused
from paceline_operator.failures import needs_events
from paceline_operator.kube import KubeClient
from paceline_operator.ownership import controller

logger = logging.getLogger(__name__)

# Collections of the children, in the order of creation.
CHILD_COLLECTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
        "Service": "/api/v1/namespaces/{namespace}/services",
        "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
        "PodDisruptionBudget": "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
        "HorizontalPodAutoscaler": "/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers",
    }
)
_SERVICES: Final = f"/apis/{names.API_VERSION}/namespaces/{{namespace}}/{names.PLURAL}"
_REPLICA_SETS: Final = "/apis/apps/v1/namespaces/{namespace}/replicasets"
_PODS: Final = "/api/v1/namespaces/{namespace}/pods"
_EVENTS: Final = "/api/v1/namespaces/{namespace}/events"

_FORBIDDEN: Final = 403
_UNCLEAR_PODS: Final = 3  # of how many pods events are read: they mostly have the same trouble
_EVENT_MESSAGE: Final = 1024  # characters, the API's own limit
_EVENT_NAME_STEM: Final = 200  # characters of the service's name in an event's name


class KubeCluster:
    """Services on a Kubernetes cluster. `read_load` tells what the pods of a service last reported."""

    def __init__(self, client: KubeClient, read_load: Callable[[Key], Load] = lambda _: Load()) -> None:
        self._client = client
        self._read_load = read_load
        self._index: set[Key] = set()

    @property
    def index(self) -> frozenset[Key]:
        """The services that existed when they were last looked at."""
        return frozenset(self._index)

    async def observe(self, key: Key) -> Observed:
        """Read the service; and while it is there, its children, its pods and the events that tell what hinders these.

        What of these may not be read is `unseen`. Raises RequestRefused where that is the service itself.
        """
        service = await self._client.read_object(f"{_collection(_SERVICES, key)}/{key.name}")
        if service is None:
            self._index.discard(key)
            return Observed(None)
        self._index.add(key)
        child = names.child_name(key.name)
        unseen: dict[str, str] = {}
        pods, replica_sets, children = await asyncio.gather(
            _unless_forbidden(unseen, _PODS, self._read_pods(key, child)),
            _unless_forbidden(unseen, _REPLICA_SETS, self._read_replica_sets(key, child)),
            self._read_all_children(key, child, unseen),
        )
        return Observed(
            service=service,
            children=children,
            replica_sets=replica_sets,
            pods=pods,
            events=await _unless_forbidden(unseen, _EVENTS, self._read_events(key, pods)),
            load=self._read_load(key),
            unseen=unseen,
        )

    async def execute(self, key: Key, plan: Plan) -> None:
        """Carry out the plan, one action after the other."""
        for action in plan.actions:
            await self._execute(key, action)
            metrics.count_action(action)

    async def _execute(self, key: Key, action: Action) -> None:
        match action:
            case Apply(manifest, uid):
                await self._apply(key, manifest, uid)
            case Delete():
                await self._delete(key, action)
            case PatchStatus():
                await self._patch_status(key, action)
            case EmitEvent():
                await self._emit(key, action)

    async def _apply(self, key: Key, manifest: Manifest, uid: str | None) -> None:
        """Apply to the object that was observed; or create, without force: if one is there by now it is not ours."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if uid:
            manifest = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        try:
            path = f"{_collection(CHILD_COLLECTIONS[kind], key)}/{name}"
            await self._client.apply_object(path, manifest, force=uid is not None)
        except RequestRefused as refusal:
            raise ChildRefused(kind, name, str(refusal)) from refusal

    async def _delete(self, key: Key, child: Delete) -> None:
        try:
            await self._client.delete_object(
                f"{_collection(CHILD_COLLECTIONS[child.kind], key)}/{child.name}", child.uid
            )
        except RequestRefused as refusal:
            raise ChildRefused(child.kind, child.name, f"cannot be deleted: {refusal}") from refusal

    async def _patch_status(self, key: Key, patch: PatchStatus) -> None:
        """Apply a status. The version guards it: on this subresource the API server does not look at the uid."""
        manifest = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": key.name, "namespace": key.namespace, "resourceVersion": patch.version},
            "status": patch.status,
        }
        path = f"{_collection(_SERVICES, key)}/{key.name}/status"
        await self._client.apply_object(path, manifest, force=True)

    async def _emit(self, key: Key, event: EmitEvent) -> None:
        """Post an event, once. One that is not posted is lost: the status, which says the same, is stored already."""
        try:
            await self._client.create_object(_collection(_EVENTS, key), _event(key, event, datetime.now(UTC)))
        except PacelineError as error:
            logger.warning("%s: event %s not posted: %s", key, event.reason, error)

    async def _read_all_children(self, key: Key, name: str, unseen: dict[str, str]) -> tuple[Manifest, ...]:
        found = await asyncio.gather(
            *(
                _unless_forbidden(unseen, collection, self._read_children(key, kind, name))
                for kind, collection in CHILD_COLLECTIONS.items()
            )
        )
        children = tuple(one for some in found for one in some)
        unlabelled = self._read_unlabelled(key, children)
        return (*children, *await _unless_forbidden(unseen, CHILD_COLLECTIONS["ConfigMap"], unlabelled))

    async def _read_children(self, key: Key, kind: str, name: str) -> tuple[Manifest, ...]:
        """The one object of this name; or the ConfigMaps, which are several and have names of their own, by label."""
        path = _collection(CHILD_COLLECTIONS[kind], key)
        if kind == "ConfigMap":
            return tuple(await self._client.list_objects(path, names.selector_string(key.name), fresh=True))
        child = await self._client.read_object(f"{path}/{name}")
        return (child,) if child else ()

    async def _read_unlabelled(self, key: Key, children: tuple[Manifest, ...]) -> tuple[Manifest, ...]:
        """The configuration that the Deployment's pods mount, where it is not among `children`: it lost its label."""
        known = {child["metadata"]["name"] for child in children if child["kind"] == "ConfigMap"}
        mounted = {
            name for child in children if child["kind"] == "Deployment" for name in _mounted_configurations(child)
        }
        path = _collection(CHILD_COLLECTIONS["ConfigMap"], key)
        read = await asyncio.gather(*(self._client.read_object(f"{path}/{name}") for name in mounted - known))
        return tuple(one for one in read if one)

    async def _read_replica_sets(self, key: Key, deployment: str) -> tuple[Manifest, ...]:
        selector = names.selector_string(key.name)
        found = await self._client.list_objects(_collection(_REPLICA_SETS, key), selector, fresh=True)
        return tuple(one for one in found if _is_replica_set_of(one, deployment))

    async def _read_pods(self, key: Key, deployment: str) -> tuple[Manifest, ...]:
        """Pods with the service's label that its Deployment's ReplicaSets made; a label alone anybody can set."""
        selector = names.selector_string(key.name)
        pods = await self._client.list_objects(_collection(_PODS, key), selector, fresh=True)
        return tuple(pod for pod in pods if _is_pod_of(pod, deployment))

    async def _read_events(self, key: Key, pods: Iterable[Manifest]) -> tuple[Manifest, ...]:
        unclear = [pod for pod in pods if needs_events(pod)][:_UNCLEAR_PODS]
        found = await asyncio.gather(*(self._read_pod_events(key, pod) for pod in unclear))
        return tuple(event for events in found for event in events)

    async def _read_pod_events(self, key: Key, pod: Manifest) -> list[Manifest]:
        selector = f"involvedObject.uid={pod['metadata']['uid']}"
        return await self._client.list_objects(_collection(_EVENTS, key), field_selector=selector)


async def _unless_forbidden(
    unseen: dict[str, str], collection: str, reading: Awaitable[tuple[Manifest, ...]]
) -> tuple[Manifest, ...]:
    """What `reading` finds; nothing where the operator has not the right to, which is then noted in `unseen`."""
    try:
        return await reading
    except RequestRefused as refusal:
        if refusal.status != _FORBIDDEN:
            raise
        unseen[collection.rpartition("/")[2]] = str(refusal)
        return ()


def _collection(template: str, key: Key) -> str:
    return template.format(namespace=key.namespace)


def _mounted_configurations(deployment: Manifest) -> Iterator[str]:
    for volume in deployment["spec"]["template"]["spec"].get("volumes", ()):
        if volume["name"] == names.CONFIG_VOLUME and "configMap" in volume:
            yield volume["configMap"]["name"]


def _is_replica_set_of(manifest: Manifest, deployment: str) -> bool:
    owner = controller(manifest)
    return (owner.get("kind"), owner.get("name")) == ("Deployment", deployment)


def _is_pod_of(manifest: Manifest, deployment: str) -> bool:
    owner = controller(manifest)
    return owner.get("kind") == "ReplicaSet" and owner["name"].rpartition("-")[0] == deployment


def _event(key: Key, event: EmitEvent, now: datetime) -> Manifest:
    moment = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{key.name[:_EVENT_NAME_STEM]}.", "namespace": key.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": key.name,
            "namespace": key.namespace,
            "uid": event.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:_EVENT_MESSAGE],
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
