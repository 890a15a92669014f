"""Every name we put into Kubernetes, each with the reason it exists, and the rule that names children.

Used by everything that renders, selects or reads objects: `desired`, `conditions`, `kube`, `adapter`, `local`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

GROUP: Final = "paceline.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "LLMService"
PLURAL: Final = "llmservices"

# --- Labels -----------------------------------------------------------------------------------------------------------

# Recommended Kubernetes labels, so that generic tools group our objects. The pair selects every object we made.
LABEL_APP: Final = "app.kubernetes.io/name"
LABEL_APP_VALUE: Final = "llmservice"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_MANAGED_BY_VALUE: Final = "paceline"
# The service a pod belongs to, as `child_name` (label-safe). Deployment, Service and scale selector use this one alone.
LABEL_SERVICE: Final = "paceline.dev/service"
# The revision (hash of the pod template) a pod was made from; tells new pods from old ones in a rollout.
LABEL_REVISION: Final = "paceline.dev/revision"

# --- Annotations ------------------------------------------------------------------------------------------------------

# Full name of the LLMService (up to 253 characters, may have dots), on pods: leads from a pod's event to its key.
ANNOTATION_SERVICE: Final = "paceline.dev/llmservice"
# The model's URI, on pods: free text has no place in a label.
ANNOTATION_MODEL: Final = "paceline.dev/model"
# Hash of the manifest we last applied, on every child: equal means that our intention has not changed since.
ANNOTATION_APPLIED: Final = "paceline.dev/applied"
# The operator's default image that the current revision was made with, on the Deployment: an operator with another
# default keeps it until something else rolls the pods. Absent while the user has chosen an image.
ANNOTATION_SERVER_IMAGE: Final = "paceline.dev/server-image"

# --- Fixed names inside the pod, known to kubectl users and to overlays -----------------------------------------------

CONTAINER: Final = "server"  # the server's container, the one that overlays merge into
PORT_NAME: Final = "http"  # the one port, by name in probes and Service
PORT: Final = 8000  # the one port, in the pod and on the Service
CONFIG_FILE: Final = "engine.yaml"  # key in the ConfigMap and file name in the pod
CONFIG_VOLUME: Final = "config"  # the volume of the ConfigMap
CONFIG_FOLDER: Final = "/etc/paceline"  # where the ConfigMap is mounted
MODEL_STORE: Final = "/models"  # PACELINE_MODEL_STORE in a pod
PVC_MOUNT: Final = "/mnt/model"  # where the claim of a pvc:// model is mounted
TENANT_KEYS_FOLDER: Final = "/etc/paceline-keys"  # PACELINE_KEYS_FOLDER in a pod: a file of keys for each tenant
EXIT_CONFIG: Final = 78  # the server's exit status where, as things are, a restart changes nothing (sysexits.h)
SECRET_KEY: Final = "HF_TOKEN"  # key in modelSecretRef's Secret and variable in the server's environment
HANDOVER_SECRET_KEY: Final = "PACELINE_HANDOVER_SECRET"  # the same of handover's Secret

# --- Names outside the pod --------------------------------------------------------------------------------------------

# The one field manager of server-side apply. Whoever else owns a field shows up beside it in managedFields.
FIELD_MANAGER: Final = "paceline-operator"
# Object metrics that the HPA asks of the metrics adapter, on the LLMService.
METRIC_QUEUE_DEPTH: Final = "queue_depth"  # waiting + running requests of all replicas
METRIC_TTFT_PRESSURE: Final = "ttft_pressure"  # p95 TTFT over spec.autoscaling.ttftObjectiveSeconds
# The extended resource that means "runs on a GPU"; MIG slices are nvidia.com/mig-….
GPU_RESOURCE_PREFIX: Final = "nvidia.com/"

# A Service name is the narrowest of all the names we make: RFC 1035 label, at most 63 characters, begins with a letter.
_DNS_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_LABEL_LENGTH: Final = 63
_HASH_LENGTH: Final = 8


def child_name(service_name: str) -> str:
    """Name of all children of an LLMService and value of their `paceline.dev/service` label.

    The service's own name when that is a valid Service name; else dots become dashes, a leading digit gets a prefix,
    and the whole is cut and given a hash of the full name, so that different services never share a name.
    The result depends on the name alone: it is the same after every restart of the operator.
    """
    if len(service_name) <= _DNS_LABEL_LENGTH and _DNS_LABEL.fullmatch(service_name):
        return service_name
    digest = hashlib.sha256(service_name.encode()).hexdigest()[:_HASH_LENGTH]
    stem = service_name.replace(".", "-")
    if not stem[0].isalpha():
        stem = f"llm-{stem}"
    stem = stem[: _DNS_LABEL_LENGTH - _HASH_LENGTH - 1].rstrip("-")
    return f"{stem}-{digest}"


def selector_labels(service_name: str) -> dict[str, str]:
    """Labels that select exactly the pods of one service; immutable in a Deployment, so there is only this one."""
    return {LABEL_SERVICE: child_name(service_name)}


def common_labels(service_name: str) -> dict[str, str]:
    """Labels of every object made for one service."""
    return {
        LABEL_APP: LABEL_APP_VALUE,
        LABEL_MANAGED_BY: LABEL_MANAGED_BY_VALUE,
        **selector_labels(service_name),
    }


def selector_string(service_name: str) -> str:
    """The selector as `status.selector` carries it for /scale: without it an HPA refuses to work."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(service_name).items())


def service_url(namespace: str, service_name: str) -> str:
    """Where the service answers inside the cluster."""
    return f"http://{child_name(service_name)}.{namespace}.svc:{PORT}"


def owner_reference(name: str, uid: str) -> dict[str, Any]:
    """The controller reference that ties a child to its LLMService of the same namespace, for the garbage collector.

    `blockOwnerDeletion` is left out: it needs the right to update finalizers of the owner and we promise none.
    """
    return {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": uid, "controller": True}
