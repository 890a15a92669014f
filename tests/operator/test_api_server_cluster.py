"""The API server that the operator's tests run on is what it says, and goes away with the test run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster.api_server import ApiServer

HOLDER = """
import sys, time
from pathlib import Path
from cluster import api_server
with api_server.running(Path(sys.argv[1])) as server:
    print(*[process.pid for process in server.processes], flush=True)
    time.sleep(600)
"""


def deployment(name: str, owner: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a Deployment whose pod will never run."""
    labels = {"app": name}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "none.invalid/none:1"}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "ownerReferences": [owner] if owner else []},
        "spec": {"selector": {"matchLabels": labels}, "template": pod},
    }


def test_controllers_turn_a_deployment_into_a_pending_pod(api_server: ApiServer, namespace: str) -> None:
    """The controller manager works; without a node the pod stays Pending."""
    here = ("-n", namespace)
    api_server.kubectl.apply(deployment("web"), namespace=namespace)
    api_server.kubectl("wait", *here, "--for=create", "pod", "-l", "app=web", "--timeout=30s")
    (pod,) = api_server.kubectl.get("pods", *here, "-l", "app=web")["items"]
    assert pod["status"]["phase"] == "Pending"


def test_children_go_with_their_owner(api_server: ApiServer, namespace: str) -> None:
    """Garbage collection by owner references works within seconds, as the operator relies on it."""
    kubectl, here = api_server.kubectl, ("-n", namespace)
    kubectl("create", "configmap", "owner", *here)
    uid = kubectl.get("configmap", "owner", *here)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid, "controller": True}
    kubectl.apply(deployment("child", owner), namespace=namespace)
    kubectl("delete", "configmap", "owner", *here)
    kubectl("wait", *here, "--for=delete", "deployment/child", "--timeout=30s")


def test_a_deleted_namespace_goes_away(api_server: ApiServer) -> None:
    """Namespace deletion does not hang on anything that this API server lacks."""
    with api_server.namespace() as name:
        api_server.kubectl("delete", "namespace", name, "--timeout=30s")
        assert not api_server.kubectl.exists("namespace", name)


def test_a_killed_test_run_leaves_no_process(tmp_path: Path, api_server: ApiServer) -> None:
    """Not even SIGKILL to the test run leaves an etcd or an API server behind."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(pids) == 3
        holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if _runs_from(pid, api_server.bin)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _runs_from(pid: int, folder: Path) -> bool:
    """Whether this process exists and its program lies in `folder`."""
    try:
        return Path(f"/proc/{pid}/exe").resolve(strict=True).parent == folder.resolve()
    except OSError:
        return False
