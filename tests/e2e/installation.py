"""Installs the chart on a cluster and takes it away again, with images that the cluster's source allows.

Used by the end-to-end tests' fixtures.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import Failed, Unavailable
from cluster.hostroot import SOURCE_TREE, HostRoot
from cluster.seam import Cluster
from e2e.evidence import SYSTEM as NAMESPACE
from e2e.evidence import evidence

CHART = SOURCE_TREE / "helm" / "paceline"
RELEASE = "paceline"
CRD = "llmservices.paceline.dev"
CRD_API = "v1alpha1.paceline.dev"  # the API server makes it for the CRD
METRICS_API = "v1beta2.custom.metrics.k8s.io"
OPERATOR_IMAGE, SERVER_IMAGE = "PACELINE_TEST_OPERATOR_IMAGE", "PACELINE_TEST_SERVER_IMAGE"

# Two replicas, the control plane and other work share two cores
RESOURCES = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}}


@dataclass(frozen=True, slots=True)
class Images:
    """What is different where images cannot be built: the chart's values, and the overlay of every LLMService."""

    values: dict[str, Any]
    spec: dict[str, Any]

    @classmethod
    def of_this_machine(cls, host: HostRoot, image: str, model_folder: Path) -> Images:
        """Run this machine's Python and source tree in the pods, with one model (…/ORG/NAME) in their model store."""
        repository, tag = image.rsplit(":", 1)
        component = {
            "command": [str(Path(sys.prefix) / "bin" / "paceline")],
            "extraVolumes": host.volumes(),
            "extraVolumeMounts": host.mounts(),
        }
        named = {"repository": repository, "tag": tag}
        values = {"image": {**named, "pullPolicy": "Never"}, "serverImage": named}
        model = {"name": "demo-model", "hostPath": {"path": str(host.on_node(model_folder)), "type": "Directory"}}
        model_mount = {
            "name": "demo-model",
            "mountPath": f"/models/{'/'.join(model_folder.parts[-2:])}",
            "readOnly": True,
        }
        server = {"name": "server", "volumeMounts": [*host.mounts(), model_mount]}
        pod = {"volumes": [*host.volumes(), model], "containers": [server]}
        spec = {"imagePullPolicy": "Never", "resources": RESOURCES, "template": {"spec": pod}}
        return cls({**values, "operator": component, "adapter": component}, spec)

    @classmethod
    def named_by_the_user(cls) -> Images:
        """Run the images that the environment names, which the cluster can pull; models come from the hub.

        Raises:
            Unavailable: when they are not named.
        """
        operator, server = os.environ.get(OPERATOR_IMAGE), os.environ.get(SERVER_IMAGE)
        if not operator or not server:
            raise Unavailable(f"name images that your cluster can pull in {OPERATOR_IMAGE} and {SERVER_IMAGE}")
        repository, tag = operator.rsplit(":", 1)
        server_repository, server_tag = server.rsplit(":", 1)
        values = {
            "image": {"repository": repository, "tag": tag},
            "serverImage": {"repository": server_repository, "tag": server_tag},
        }
        return cls(values, {"resources": RESOURCES})


@contextlib.contextmanager
def system_namespace(cluster: Cluster) -> Iterator[None]:
    """Make the namespace of a release; afterwards it, the release and the CRD are gone."""
    kubectl = cluster.kubectl
    kubectl("create", "namespace", NAMESPACE)
    try:
        kubectl("wait", "--for=create", "serviceaccount/default", "-n", NAMESPACE, "--timeout=30s")
        yield
    finally:
        cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--ignore-not-found")
        kubectl("delete", "customresourcedefinition", CRD, "--ignore-not-found", "--timeout=60s")
        kubectl("delete", "namespace", NAMESPACE, "--timeout=60s")


def install(cluster: Cluster, images: Images) -> None:
    """`helm install` the chart, until operator, adapter and metrics API are available.

    Raises:
        Failed: when they are not within two minutes, with what helm said and what is seen on the cluster.
    """
    where = ("--namespace", NAMESPACE, "--values", "-", "--wait", "--timeout", "120s")
    try:
        cluster.helm("install", RELEASE, str(CHART), *where, input=json.dumps(images.values))
        cluster.kubectl("wait", "--for=condition=Available", f"apiservice/{METRICS_API}", "--timeout=60s")
    except Failed as failure:
        raise Failed(f"{failure}\n{evidence(cluster)}") from failure


def uninstall(cluster: Cluster) -> None:
    """`helm uninstall` the release."""
    cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")
