"""An API server without nodes: etcd, kube-apiserver and kube-controller-manager on 127.0.0.1, for the operator's tests.

Everything that is not a container is real: defaulting and validation of the CRD, server-side apply, RBAC, garbage
collection by owner references, ReplicaSets, the HPA, aggregated APIs. Pods are made and stay Pending; a test that wants
one Ready patches its status. Started by the `api_server` fixture; needs neither root nor a container runtime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cluster import cache
from cluster.access import Identity, Kubectl, write_kubeconfig
from cluster.control_plane import ControlPlane
from cluster.process import Process, all_stopped, free_port, http_ok


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running API server and what a test needs to use it.

    An aggregated API (the metrics adapter) is reached through a Service of type ExternalName `localhost`.
    """

    url: str
    kubeconfig: Path
    bin: Path
    kubectl: Kubectl
    processes: list[Process] = field(repr=False)

    def namespace(self, prefix: str = "test") -> contextlib.AbstractContextManager[str]:
        """Yield the name of a new namespace that is deleted afterwards."""
        return self.kubectl.namespace(prefix)

    def kubeconfig_for(self, token: str, path: Path) -> Path:
        """Write a kubeconfig for the bearer of a token, e.g. one that `kubectl create token` gave; returns `path`."""
        write_kubeconfig(path, self.url, self.kubeconfig.with_name("ca.crt"), token)
        return path


@contextlib.contextmanager
def running(state: Path) -> Iterator[ApiServer]:
    """Yield an API server whose files are in `state`, an empty folder; on leaving, nothing is left running.

    Raises:
        Unavailable: where the programs are not built.
        Failed: when one of them does not come up, with the end of its log.
    """
    programs = cache.require("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
    plane = ControlPlane(programs, state, "127.0.0.1", free_port(), free_port(), free_port())
    admin = Identity.create("admin", "system:masters")
    plane.write_credentials(["localhost", "kubernetes.default.svc"], [admin])
    write_kubeconfig(plane.kubeconfig, plane.url, plane.authority, admin.token)
    processes: list[Process] = []
    with all_stopped(processes):
        _start(plane, processes)
        kubectl = Kubectl((str(programs / "kubectl"),), plane.kubeconfig)
        kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=30s")
        yield ApiServer(plane.url, plane.kubeconfig, programs, kubectl, processes)


def _start(plane: ControlPlane, processes: list[Process]) -> None:
    """Start the three programs in order, each in `processes` from its first moment."""

    def start(name: str, argv: list[str]) -> Process:
        processes.append(Process(name, argv, plane.state / f"{name}.log"))
        return processes[-1]

    start("etcd", plane.etcd()).wait_until(lambda: http_ok(f"{plane.etcd_url}/readyz"), seconds=30)
    server = plane.api_server(
        "--endpoint-reconciler-type=none",  # a loopback address is no endpoint
        "--service-cluster-ip-range=10.0.0.0/16",
        "--authorization-mode=RBAC",
    )
    start("kube-apiserver", server).wait_until(lambda: http_ok(f"{plane.url}/readyz", plane.authority), seconds=60)
    start("kube-controller-manager", plane.controller_manager())
