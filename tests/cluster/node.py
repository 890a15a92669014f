"""A cluster of one node made from built programs, on a Linux machine without a container engine; needs root.

Everything runs in mount, network and process namespaces of its own: containerd, control plane, kubelet, pods. One
signal to `node_hold.sh` ends it all. Its addresses exist only inside; `Cluster.run_inside` enters the network.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster import cache, components, packages
from cluster.access import Identity, Kubectl, write_kubeconfig
from cluster.control_plane import ControlPlane
from cluster.errors import Failed, Unavailable
from cluster.images import IMPORT_SECONDS, write_pause
from cluster.node_config import API_SERVICE_IP, GATEWAY_IP, NODE_IP, NODE_NAME, SERVICE_RANGE, NodeConfig
from cluster.process import Process, all_stopped
from cluster.seam import Cluster, Helm, inside_network_of, run_tool

HERE = Path(__file__).parent

IDENTITIES = {
    "admin": Identity.create("admin", "system:masters"),
    "kube-scheduler": Identity.create("system:kube-scheduler"),
    "kube-proxy": Identity.create("system:kube-proxy"),
    "kubelet": Identity.create(f"system:node:{NODE_NAME}", "system:nodes"),
}


def require_machine() -> None:
    """Check that this machine can have such a node at all.

    Raises:
        Unavailable: when it cannot, with the reason.
    """
    if platform.system() != "Linux":
        raise Unavailable(f"a node of our own needs Linux, and this is {platform.system()}")
    if os.geteuid() != 0:
        raise Unavailable("a node of our own needs root (namespaces, mounts, control groups)")


@contextlib.contextmanager
def running(state: Path) -> Iterator[Cluster]:
    """Yield a cluster whose files are in `state`, an empty folder; on leaving, nothing is left running or mounted.

    Raises:
        Unavailable: when this machine lacks root, packages or the built programs.
        Failed: when a part does not come up, with the end of its log.
    """
    require_machine()
    programs = cache.require(*components.NODE)
    if missing := packages.missing():
        raise Unavailable(f"not installed: {', '.join(missing)}; run `make cluster` once")
    node = _Node(programs, state)
    with all_stopped(node.processes):
        yield node.start()
    for folder in ("containerd", "etcd", "kubelet"):  # large or odd; the logs stay
        shutil.rmtree(state / folder, ignore_errors=True)


class _Node:
    """The steps of bringing up one node."""

    def __init__(self, programs: Path, state: Path) -> None:
        self.state = state
        self.programs = programs
        self.config = NodeConfig(state, f"/paceline-node-{os.getpid()}-{time.monotonic_ns()}")
        self.plane = ControlPlane(programs, state, NODE_IP, 6443, 2379, 2380)
        self.processes: list[Process] = []

    def start(self) -> Cluster:
        """Bring up the node and return it, Ready."""
        self._write_files()
        pid = self._start_namespaces()
        self._enter = ("nsenter", f"--target={pid}", "--mount", "--net", "--pid", "--")
        network = inside_network_of(pid)
        kubectl = Kubectl((*network, str(self.programs / "kubectl")), self.plane.kubeconfig)
        helm = Helm((*network, str(self.programs / "helm")), self.plane.kubeconfig)
        cluster = Cluster("the built node", kubectl, helm, network, self._import_image, Path("/"))
        self._start_containerd()
        self._start_control_plane(kubectl)
        self._start_node_programs()
        kubectl("wait", "--for=create", f"node/{NODE_NAME}", "--timeout=60s")
        kubectl("wait", "--for=condition=Ready", f"node/{NODE_NAME}", "--timeout=60s")
        kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=30s")
        return cluster

    def _write_files(self) -> None:
        names = ["localhost", "127.0.0.1", API_SERVICE_IP, "kubernetes.default.svc", "kubernetes.default"]
        self.plane.write_credentials(names, list(IDENTITIES.values()))
        for name, identity in IDENTITIES.items():
            path = self.plane.kubeconfig if name == "admin" else self.state / f"{name}.kubeconfig"
            write_kubeconfig(path, self.plane.url, self.plane.authority, identity.token)
        self.config.cni_folder.mkdir()
        for name, text in {
            "containerd.toml": self.config.containerd(),
            "cni/10-pods.conflist": self.config.pod_network(),
            "kubelet.yaml": self.config.kubelet(),
            "kube-proxy.yaml": self.config.kube_proxy(),
            "Corefile": self.config.coredns(),
        }.items():
            (self.state / name).write_text(text)

    def _start_namespaces(self) -> int:
        """Start the empty node and return the id of its first process."""
        init = [HERE / "node_init.sh", self.state, self.config.cgroup, NODE_IP, GATEWAY_IP]
        argv = [HERE / "node_hold.sh", self.state, self.config.cgroup, *init]
        log = self.state / "node.log"
        holder = Process("node", [str(part) for part in argv], log, death_signal="TERM")
        self.processes.append(holder)
        holder.wait_until(lambda: (self.state / "node.pid").exists() and (self.state / "ready").exists(), seconds=20)
        return int((self.state / "node.pid").read_text())

    def _run(self, name: str, argv: list[str]) -> Process:
        """Start one of the node's programs inside it."""
        process = Process(name, [*self._enter, *argv], self.state / f"{name}.log")
        self.processes.append(process)
        return process

    def _start_containerd(self) -> None:
        containerd = self._run("containerd", ["containerd", f"--config={self.state / 'containerd.toml'}"])
        containerd.wait_until(_succeeds(lambda: self._ctr("version")), seconds=30)
        self._import_image(write_pause(self.state, self.programs / "pause"))

    def _start_control_plane(self, kubectl: Kubectl) -> None:
        self._run("etcd", self.plane.etcd())
        server = self._run(
            "kube-apiserver",
            self.plane.api_server(
                f"--service-cluster-ip-range={SERVICE_RANGE}",
                "--authorization-mode=Node,RBAC",
                "--allow-privileged",
                "--kubelet-preferred-address-types=InternalIP",
                f"--kubelet-client-certificate={self.state / 'kubelet-client.crt'}",
                f"--kubelet-client-key={self.state / 'kubelet-client.key'}",
            ),
        )
        server.wait_until(_succeeds(lambda: kubectl("get", "--raw=/readyz", timeout=5)), seconds=60)
        self._run("kube-controller-manager", self.plane.controller_manager())

    def _start_node_programs(self) -> None:
        state = self.state
        scheduler = [f"--kubeconfig={state / 'kube-scheduler.kubeconfig'}", "--leader-elect=false"]
        kubelet = [
            f"--config={state / 'kubelet.yaml'}",
            f"--kubeconfig={state / 'kubelet.kubeconfig'}",
            f"--root-dir={state / 'kubelet'}",
            f"--cert-dir={state / 'kubelet-pki'}",
            f"--node-ip={NODE_IP}",
            f"--hostname-override={NODE_NAME}",
        ]
        self._run("kube-scheduler", [str(self.programs / "kube-scheduler"), *scheduler])
        self._run("kubelet", [str(self.programs / "kubelet"), *kubelet])
        self._run("kube-proxy", [str(self.programs / "kube-proxy"), f"--config={state / 'kube-proxy.yaml'}"])
        self._run("coredns", [str(self.programs / "coredns"), f"-conf={state / 'Corefile'}"])

    def _import_image(self, archive: Path) -> None:
        self._ctr("--namespace=k8s.io", "images", "import", str(archive), timeout=IMPORT_SECONDS)

    def _ctr(self, *args: str, timeout: float = 60) -> str:
        return run_tool([*self._enter, "ctr", f"--address={self.config.containerd_socket}", *args], timeout=timeout)


def _succeeds(attempt: Callable[[], object]) -> Callable[[], bool]:
    """Return a condition that holds once `attempt` neither fails nor takes too long."""

    def condition() -> bool:
        try:
            attempt()
        except (Failed, subprocess.TimeoutExpired):
            return False
        return True

    return condition
