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
IMAGE_ARCHIVES = "PACELINE_TEST_IMAGE_ARCHIVES"

# Two replicas, the control plane and other work share two cores
RESOURCES = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}}


@dataclass(frozen=True, slots=True)
class DemoModel:
    """The demo's model on the node, as a volume and where the server's model store has it."""

    volume: dict[str, Any]
    mount: dict[str, Any]

    @classmethod
    def on_node(cls, host_root: Path, folder: Path) -> DemoModel:
        """Return the model of `folder` (…/ORG/NAME), on a node that sees this machine's root at `host_root`."""
        path = host_root / folder.relative_to("/")
        volume = {"name": "demo-model", "hostPath": {"path": str(path), "type": "Directory"}}
        store = f"/models/{'/'.join(folder.parts[-2:])}"
        return cls(volume, {"name": "demo-model", "mountPath": store, "readOnly": True})


@dataclass(frozen=True, slots=True)
class Images:
    """Which images are run: the chart's values, and the overlay of every LLMService."""

    values: dict[str, Any]
    spec: dict[str, Any]

    @classmethod
    def of_this_machine(cls, host: HostRoot, image: str, model: DemoModel) -> Images:
        """Run this machine's Python and source tree in the pods, with one model in their model store."""
        component = {
            "command": [str(Path(sys.prefix) / "bin" / "paceline")],
            "extraVolumes": host.volumes(),
            "extraVolumeMounts": host.mounts(),
        }
        named = _named(image)
        values = {"image": {**named, "pullPolicy": "Never"}, "serverImage": named}
        template = _template([*host.volumes(), model.volume], [*host.mounts(), model.mount])
        spec = {"imagePullPolicy": "Never", "resources": RESOURCES, "template": template}
        return cls({**values, "operator": component, "adapter": component}, spec)

    @classmethod
    def named_by_the_user(cls, model: DemoModel | None) -> Images:
        """Run the images that the environment names; without `model`, models come from the hub.

        Raises:
            Unavailable: when they are not named.
        """
        operator, server = os.environ.get(OPERATOR_IMAGE), os.environ.get(SERVER_IMAGE)
        if not operator or not server:
            raise Unavailable(f"name images that your cluster can pull in {OPERATOR_IMAGE} and {SERVER_IMAGE}")
        spec: dict[str, Any] = {"resources": RESOURCES}
        if model:
            spec["template"] = _template([model.volume], [model.mount])
        return cls({"image": _named(operator), "serverImage": _named(server)}, spec)


def archives_of_the_user() -> list[Path]:
    """Return the image archives (`docker save`) that the environment names, for nodes that can pull nothing."""
    return [Path(name) for name in os.environ.get(IMAGE_ARCHIVES, "").split(os.pathsep) if name]


def _named(image: str) -> dict[str, Any]:
    repository, tag = image.rsplit(":", 1)
    return {"repository": repository, "tag": tag}


def _template(volumes: list[dict[str, Any]], mounts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"spec": {"volumes": volumes, "containers": [{"name": "server", "volumeMounts": mounts}]}}


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
