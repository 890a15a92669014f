"""A cluster made by kind, on a machine where a container engine runs.

The node is a container: this machine's folders are mounted into it under one folder, and images are put on it by
`kind load`. Pods' addresses are behind the engine's network, so tests reach Services by port-forward.

A container has no parent-death signal: a killed test run leaves the cluster, and the next run replaces it.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from cluster import cache
from cluster.access import Kubectl
from cluster.errors import Unavailable
from cluster.hostroot import HostRoot
from cluster.images import IMPORT_SECONDS
from cluster.seam import Cluster, Helm, run_tool

NAME = "paceline-test"
HOST_ROOT = Path("/paceline-host")  # in the node's container


def require_engine() -> None:
    """Check that a container engine answers.

    Raises:
        Unavailable: when there is none, with what it said.
    """
    if not shutil.which("docker"):
        raise Unavailable("no container engine: docker is not on PATH")
    command = ["docker", "info", "--format", "{{.ServerVersion}}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise Unavailable(f"no container engine runs: {done.stderr.strip()}")


def configuration(folders: Sequence[Path]) -> str:
    """Render kind's configuration: one node that sees these folders, and an HPA that looks each second."""
    manager = {"horizontal-pod-autoscaler-sync-period": "1s", "horizontal-pod-autoscaler-initial-readiness-delay": "1s"}
    patch = {"kind": "ClusterConfiguration", "controllerManager": {"extraArgs": manager}}
    mounts = [
        {"hostPath": str(folder), "containerPath": str(HOST_ROOT / folder.relative_to("/")), "readOnly": True}
        for folder in folders
    ]
    return yaml.safe_dump(
        {
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "kind": "Cluster",
            "nodes": [{"role": "control-plane", "extraMounts": mounts}],
            "kubeadmConfigPatches": [yaml.safe_dump(patch)],  # no apiVersion: kind fits it to the node's
        }
    )


@contextlib.contextmanager
def running(state: Path) -> Iterator[Cluster]:
    """Yield a new kind cluster whose kubeconfig is in `state`; it is deleted on leaving.

    Raises:
        Unavailable: without a container engine or the programs.
        Failed: when kind does not bring it up, with what it said.
    """
    require_engine()
    programs = cache.require("kind", "kubectl", "helm")
    kind, kubectl, helm = (str(programs / name) for name in ("kind", "kubectl", "helm"))
    kubeconfig, config = state / "kubeconfig", state / "kind.yaml"
    store = cache.model_store()
    store.mkdir(parents=True, exist_ok=True)
    config.write_text(configuration(HostRoot.of_this_python(HOST_ROOT, store).folders))
    this = [f"--name={NAME}", f"--kubeconfig={kubeconfig}"]

    def load(archive: Path) -> None:
        run_tool([kind, "load", "image-archive", str(archive), f"--name={NAME}"], timeout=IMPORT_SECONDS)

    run_tool([kind, "delete", "cluster", *this], timeout=120)  # of a run that was killed
    try:
        run_tool([kind, "create", "cluster", *this, f"--config={config}", "--wait=180s"], timeout=600)
        yield Cluster("kind", Kubectl((kubectl,), kubeconfig), Helm((helm,), kubeconfig), (), load, HOST_ROOT)
    finally:
        run_tool([kind, "delete", "cluster", *this], timeout=120)
