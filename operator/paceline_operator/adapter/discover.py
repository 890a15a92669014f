"""Finds the LLMServices of the cluster and the pods of each, from lists of both. Called by the collector every round.

Two lists a round, answered from the API server's cache, in place of watches: what is forgotten between two rounds
cannot leak, and a lost watch cannot freeze the numbers that scaling follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from paceline_operator import names
from paceline_operator.adapter.source import ObjectSource
from paceline_operator.cluster import Key, Manifest
from paceline_operator.ownership import is_alive
from paceline_operator.pods import container_statuses, has_ended, hindrance, is_placed, is_ready, ready_changed_at
from paceline_operator.spec import AutoscalingSpec, LLMServiceSpec

SERVICES_PATH: Final = f"/apis/{names.API_VERSION}/{names.PLURAL}"
PODS_PATH: Final = "/api/v1/pods"
POD_SELECTOR: Final = (
    f"{names.LABEL_APP}={names.LABEL_APP_VALUE},{names.LABEL_MANAGED_BY}={names.LABEL_MANAGED_BY_VALUE}"
)
DEFAULT_TTFT_OBJECTIVE_SECONDS: Final = AutoscalingSpec.model_fields["ttft_objective_seconds"].default
"""For a service without `spec.autoscaling`: no HPA asks then, but people may."""
DEFAULT_STARTUP_SECONDS: Final = LLMServiceSpec.model_fields["startup_seconds"].default


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that serves, or will.

    Terminating ones are left out, new requests no longer reach them. So are those that have ended: an evicted pod stays
    as a record for days, with an address that another pod may have by now.

    `metrics_url` is None while it has no address.
    """

    uid: str
    metrics_url: str | None
    ready: bool
    loading: bool


@dataclass(frozen=True, slots=True)
class ServicePods:
    """What the adapter has to know of one LLMService."""

    ttft_objective_seconds: float
    pods: tuple[Pod, ...]


def service_path(key: Key) -> str:
    """Path of one LLMService."""
    return f"/apis/{names.API_VERSION}/namespaces/{key.namespace}/{names.PLURAL}/{key.name}"


async def discover(source: ObjectSource, now: datetime) -> dict[Key, ServicePods]:
    """List services and pods and bring them together. Raises ClusterUnavailable."""
    services = await source.list_objects(SERVICES_PATH)
    pods = await source.list_objects(PODS_PATH, POD_SELECTOR)
    return assign(services, pods, now)


def assign(services: Iterable[Manifest], pods: Iterable[Manifest], now: datetime) -> dict[Key, ServicePods]:
    """Give each service its pods: same namespace, and the label that the operator puts on them."""
    by_label: dict[tuple[str, str], list[Manifest]] = {}
    for pod in pods:
        metadata = pod["metadata"]
        label = metadata.get("labels", {}).get(names.LABEL_SERVICE)
        if label and is_alive(pod) and not has_ended(pod):
            by_label.setdefault((metadata["namespace"], label), []).append(pod)
    found = {}
    for service in services:
        key = Key(service["metadata"]["namespace"], service["metadata"]["name"])
        own = by_label.get((key.namespace, names.child_name(key.name)), ())
        found[key] = read_service(service, own, now)
    return found


def read_service(service: Manifest, pods: Iterable[Manifest], now: datetime) -> ServicePods:
    """Read a service's objective and the state of its pods."""
    spec = service.get("spec", {})
    objective = spec.get("autoscaling", {}).get("ttftObjectiveSeconds", DEFAULT_TTFT_OBJECTIVE_SECONDS)
    startup_seconds = float(spec.get("startupSeconds", DEFAULT_STARTUP_SECONDS))
    return ServicePods(float(objective), tuple(read_pod(pod, startup_seconds, now) for pod in pods))


def read_pod(pod: Manifest, startup_seconds: float, now: datetime) -> Pod:
    """Read where a pod's metrics are and whether it is on its way to Ready.

    Loading is placed on a node, not Ready for no longer than its start-up budget and not backing off; so a server that
    is started again after days has a budget anew. A pod that waits for a free GPU, or that crashes, is not loading:
    holding the replicas for its sake would keep it forever.
    """
    ready = is_ready(pod)
    since = ready_changed_at(pod) or pod.get("status", {}).get("startTime") or pod["metadata"]["creationTimestamp"]
    in_time = (now - datetime.fromisoformat(since)).total_seconds() <= startup_seconds
    backs_off = any(hindrance(container) for container in container_statuses(pod))
    loading = is_placed(pod) and in_time and not ready and not backs_off
    return Pod(pod["metadata"]["uid"], _metrics_url(pod), ready, loading)


def _metrics_url(pod: Manifest) -> str | None:
    address = pod.get("status", {}).get("podIP")
    if not address:
        return None
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{_port(pod)}/metrics"


def _port(pod: Manifest) -> int:
    for container in pod.get("spec", {}).get("containers", ()):
        if container["name"] == names.CONTAINER:
            ports = {port.get("name"): port["containerPort"] for port in container.get("ports", ())}
            return int(ports.get(names.PORT_NAME, names.PORT))
    return names.PORT
