"""The cluster that the end-to-end tests run on is a real one, and goes away with the test run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import node
from cluster.errors import Unavailable
from cluster.hostroot import HostRoot
from cluster.seam import Cluster

TESTS = Path(__file__).parents[1]
SERVE = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port=8000, bind='0.0.0.0')"
GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).status)"
PORT = 8000


def web(host_python: HostRoot, image: str) -> list[dict[str, Any]]:
    """Return a Deployment and a Service of a web server that needs nothing but Python."""
    labels = {"app": "web"}
    container = {
        "name": "web",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", SERVE],
        "readinessProbe": {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1},
    }
    pod: dict[str, Any] = {"containers": [container], "terminationGracePeriodSeconds": 0}
    host_python.add_to_pod(pod)
    template = {"metadata": {"labels": labels}, "spec": pod}
    deployment = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    service = {"selector": labels, "ports": [{"port": PORT}]}
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": deployment},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": service},
    ]


def test_pods_are_reached_by_service_address_and_by_name(
    node_cluster: Cluster, host_python: HostRoot, host_image: str, namespace: str
) -> None:
    """Scheduler, kubelet, runtime, probes, service addresses and cluster DNS work, with this machine's Python."""
    kubectl = node_cluster.kubectl
    kubectl.apply(*web(host_python, host_image), namespace=namespace)
    kubectl("rollout", "status", "deployment/web", "-n", namespace, "--timeout=60s")
    with node_cluster.reach(namespace, "web", PORT) as url:
        assert node_cluster.run_inside(sys.executable, "-c", GET, url).strip() == "200"
    by_name = f"http://web.{namespace}.svc:{PORT}"
    assert kubectl("exec", "deployment/web", "-n", namespace, "--", "python", "-c", GET, by_name).strip() == "200"
    assert "GET / HTTP" in kubectl("logs", "deployment/web", "-n", namespace)


def test_a_killed_test_run_leaves_no_node(tmp_path: Path) -> None:
    """Not even SIGKILL to the test run leaves a process or a control group of the node behind."""
    try:
        node.require_machine()
    except Unavailable as reason:
        pytest.skip(str(reason))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        assert _traces(tmp_path, holder.pid)
        holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while (left := _traces(tmp_path, holder.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


HOLDER = """
import sys, time
from pathlib import Path
from cluster import node
with node.running(Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(600)
"""


def _traces(state: Path, owner: int) -> list[str]:
    """Return the command lines that name the node's folder, mounts below it, and its owner's control groups."""
    folders = [folder for folder, _, _ in os.walk("/sys/fs/cgroup")]  # unlike glob, it passes over what has just gone
    traces = [folder for folder in folders if f"/paceline-node-{owner}-" in folder]
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        if any(f"={state}/" in word for word in words):
            traces.append(" ".join(words))
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return traces + [line for line in mounts if str(state) in line]
