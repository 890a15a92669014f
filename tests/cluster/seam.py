"""What a test may ask of a cluster with nodes, whichever of the three sources it comes from.

`node`, `kind` and `existing` each yield a `Cluster`; `sources` chooses; the fixture `node_cluster` hands it to tests.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.access import Kubectl
from cluster.errors import Failed

# connects to an address and port, trying again for 20 s
_CONNECT = """
import socket, sys, time
deadline = time.monotonic() + 20
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2).close()
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
"""


@dataclass(frozen=True, slots=True)
class Helm:
    """`helm` bound to one cluster: `helm("list")` returns what it prints."""

    program: tuple[str, ...]
    kubeconfig: Path

    def __call__(self, *args: str, input: str | None = None, timeout: float = 180) -> str:
        """Run helm and return its output.

        Raises:
            Failed: when helm exits with an error, with what it said.
            subprocess.TimeoutExpired: after `timeout` seconds.
        """
        command = [*self.program, f"--kubeconfig={self.kubeconfig}", *args]
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise Failed(f"helm {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster with at least one node."""

    source: str  # for messages: "built node", "kind", or the kubeconfig's path
    kubectl: Kubectl
    helm: Helm
    inside: tuple[str, ...]  # stands before a command that must reach ClusterIPs; empty where they can't be reached
    load: Callable[[Path], None] | None  # puts an image archive on every node; None where we may not
    host_root: Path | None  # where a node sees this machine's root folder; None where it does not

    @property
    def kubeconfig(self) -> Path:
        """The administrator's access; its server may be reachable only from `inside`."""
        return self.kubectl.kubeconfig

    def run_inside(self, *argv: str, input: str | None = None, timeout: float = 120) -> str:
        """Run a program of this machine where the cluster's addresses are reachable; returns what it prints.

        Raises:
            Failed: when it exits with an error, with what it said.
            subprocess.TimeoutExpired: after `timeout` seconds.
        """
        command = [*self.inside, *argv]
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise Failed(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def start_inside(self, *argv: str) -> subprocess.Popen[str]:
        """Start a program as `run_inside` does; the caller ends it and reads its output."""
        pipe = subprocess.PIPE
        return subprocess.Popen([*self.inside, *argv], stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def import_image(self, archive: Path) -> None:
        """Put an image archive on every node.

        Raises:
            Failed: on a cluster that we may not put images on.
        """
        if self.load is None:
            raise Failed(f"images cannot be put on the nodes of {self.source}")
        self.load(archive)

    @contextlib.contextmanager
    def reach(self, namespace: str, service: str, port: int) -> Iterator[str]:
        """Yield the URL of a Service for programs started by `run_inside` and `start_inside`.

        It is the Service's ClusterIP where that can be reached, else a port-forward to one of its pods. A pod must be
        Ready; that kube-proxy knows it too is waited for.
        """
        if self.inside:
            address = self.kubectl.get("service", service, "-n", namespace)["spec"]["clusterIP"]
            self.run_inside(sys.executable, "-c", _CONNECT, address, str(port))
            yield f"http://{address}:{port}"
            return
        target = ["port-forward", "-n", namespace, f"service/{service}", f":{port}"]
        command = [*self.kubectl.program, f"--kubeconfig={self.kubeconfig}", *target]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
            try:
                assert forward.stdout is not None
                said = re.search(r"127\.0\.0\.1:(\d+)", forward.stdout.readline())
                if not said:
                    raise Failed(f"kubectl port-forward to service/{service} in {namespace} did not start")
                yield f"http://127.0.0.1:{said[1]}"
            finally:
                forward.terminate()


def inside_network_of(pid: int) -> tuple[str, ...]:
    """Return the command prefix that enters the network of a process; needs root."""
    return ("nsenter", f"--target={pid}", "--net", "--")


def run_tool(argv: Sequence[str], timeout: float) -> str:
    """Run a set-up program and return what it prints.

    Raises:
        Failed: when it exits with an error, with the end of what it said.
    """
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(argv)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout
