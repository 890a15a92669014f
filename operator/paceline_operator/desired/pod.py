"""The pod of a service: container, probes, volumes, security. The same function gives local mode its process.

Everything in the template is pod-affecting: a changed template is a new revision and rolls the pods. What may change
without a roll (replicas, autoscaling, strategy) is therefore kept out of it.
"""

from __future__ import annotations

from typing import Any, Final

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.desired.config import config_map_name
from paceline_operator.desired.metadata import digest
from paceline_operator.desired.overlay import merge_pod
from paceline_operator.model_uri import Claim, Folder
from paceline_operator.spec import LLMService, SecretReference

# Endpoints are updated beside the end of a pod, not before it: new requests may arrive for some seconds more.
ENDPOINT_LAG_SECONDS: Final = 5
# After the drain's own deadline: time for the last bytes and the exit before the kubelet kills.
EXIT_SECONDS: Final = 10
# Any non-root user will do: the image's files are readable by all, and what is written goes to volumes of this group.
_USER: Final = 65532
# Mode of the files of keys: root owns them, the user reads them by its group. In decimal, as the API server stores it.
_GROUP_READS: Final = 0o440
# Shared memory between gateway, engine and workers; Kubernetes' default of 64 MiB is too small for tensors.
_SHARED_MEMORY: Final = "1Gi"


def render_pod_template(service: LLMService, image: str) -> Manifest:
    """The pod template (metadata, spec) with the user's overlay merged in, without the revision label."""
    template: Manifest = {
        "metadata": {
            "labels": names.common_labels(service.name),
            "annotations": {
                names.ANNOTATION_SERVICE: service.name,
                names.ANNOTATION_MODEL: service.spec.model,
            },
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": ENDPOINT_LAG_SECONDS + service.spec.drain_seconds + EXIT_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_server(service, image)],
            "volumes": _volumes(service),
        },
    }
    return merge_pod(template, service.spec.template)


def revision_of(template: Manifest) -> str:
    """Hash of a pod template: the value of the revision label and of `status.revision`."""
    return digest(template)


def _server(service: LLMService, image: str) -> dict[str, Any]:
    spec = service.spec
    container: dict[str, Any] = {
        "name": names.CONTAINER,
        "image": image,
        "command": ["paceline-server"],
        "args": ["serve", "--config", f"{names.CONFIG_FOLDER}/{names.CONFIG_FILE}"],
        "ports": [{"name": names.PORT_NAME, "containerPort": names.PORT, "protocol": "TCP"}],
        "env": _environment(service),
        "resources": spec.resources.model_dump(exclude_defaults=True),
        "volumeMounts": _mounts(service),
        "startupProbe": _probe("/readyz", period=1, timeout=3, failures=spec.startup_seconds),
        "readinessProbe": _probe("/readyz", period=2, timeout=3, failures=2),
        "livenessProbe": _probe("/healthz", period=10, timeout=5, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINT_LAG_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if spec.image_pull_policy:
        container["imagePullPolicy"] = spec.image_pull_policy
    return container


def _probe(path: str, *, period: int, timeout: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": names.PORT_NAME},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def _environment(service: LLMService) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = [
        {"name": "PACELINE_MODEL_STORE", "value": names.MODEL_STORE},
        {"name": "HOME", "value": "/tmp"},  # caches of libraries go where writing is allowed
    ]
    if secret := service.spec.model_secret_ref:
        variables.append(_from_secret(names.SECRET_KEY, secret))
    if handover := service.spec.handover:
        variables.append(_from_secret(names.HANDOVER_SECRET_KEY, handover.secret_ref))
    if _key_sources(service):
        variables.append({"name": "PACELINE_KEYS_FOLDER", "value": names.TENANT_KEYS_FOLDER})
    return variables


def _from_secret(key: str, secret: SecretReference) -> dict[str, Any]:
    return {"name": key, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": key}}}


def _key_sources(service: LLMService) -> list[dict[str, Any]]:
    """The keys of each tenant as a file of its name. The kubelet follows a changed Secret, and the server the file."""
    return [
        {"secret": {"name": reference.name, "items": [{"key": reference.key, "path": tenant.name}]}}
        for tenant in service.spec.tenants
        if tenant.keys_from and (reference := tenant.keys_from.secret_key_ref)
    ]


def _mounts(service: LLMService) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": names.CONFIG_VOLUME, "mountPath": names.CONFIG_FOLDER, "readOnly": True},
        {"name": "models", "mountPath": names.MODEL_STORE},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "dshm", "mountPath": "/dev/shm"},
    ]
    if _key_sources(service):
        mounts.append({"name": "tenant-keys", "mountPath": names.TENANT_KEYS_FOLDER, "readOnly": True})
    match service.spec.model_uri:
        case Claim():
            mounts.append({"name": "model", "mountPath": names.PVC_MOUNT, "readOnly": True})
        case Folder(path):
            mounts.append({"name": "model", "mountPath": path, "readOnly": True})
    return mounts


def _volumes(service: LLMService) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": names.CONFIG_VOLUME, "configMap": {"name": config_map_name(service)}},
        {"name": "models", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}},
    ]
    if sources := _key_sources(service):
        volumes.append({"name": "tenant-keys", "projected": {"sources": sources, "defaultMode": _GROUP_READS}})
    match service.spec.model_uri:
        case Claim(claim=claim):
            volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
        case Folder(path):
            volumes.append({"name": "model", "hostPath": {"path": path, "type": "Directory"}})
    return volumes
