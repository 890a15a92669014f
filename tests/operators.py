"""Operators under test: the real process, as `paceline operator` runs it, against a real API server."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.access import Kubectl, KubectlError
from cluster.process import Process, free_port, http_ok

IMAGE = "registry.example/server:1"
LEASE_SECONDS = 6.0  # long enough for a machine that does other things too
CHILDREN = "deployment,service,configmap,pdb,hpa"
OURS = "app.kubernetes.io/managed-by=paceline"
PROGRAM = """
import json, logging, sys
from paceline_operator.run import run_operator
from paceline_operator.settings import OperatorSettings
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
settings = json.loads(sys.argv[1])
sys.exit(run_operator(OperatorSettings(**{**settings, "namespaces": tuple(settings["namespaces"])})))
"""


class OperatorProcess:
    """One operator process."""

    def __init__(self, log: Path, **settings: Any) -> None:
        """Start it with these settings; it is called as its log is."""
        self.identity = log.stem
        self._metrics_port, self._health_port = free_port(), free_port()
        known = {
            "namespaces": [],
            "lease_seconds": LEASE_SECONDS,
            "identity": self.identity,
            "server_image": IMAGE,
            "metrics_port": self._metrics_port,
            "health_port": self._health_port,
        }
        self.process = Process("operator", [sys.executable, "-c", PROGRAM, json.dumps(known | settings)], log)
        self.process.wait_until(self.answers, seconds=60)

    def answers(self) -> bool:
        """Whether both ports answer and the liveness probe would pass."""
        ports = (self._health_port, "healthz"), (self._metrics_port, "metrics")
        return all(http_ok(f"http://127.0.0.1:{port}/{path}") for port, path in ports)

    def is_ready(self) -> bool:
        """Whether the readiness probe would pass."""
        return http_ok(f"http://127.0.0.1:{self._health_port}/readyz")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def leads(self) -> bool:
        """Whether it holds the lease."""
        return self.metric("paceline_operator_leader") == 1

    def kill(self) -> None:
        """SIGKILL, as a node that loses power."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.stop()

    def stop(self) -> None:
        """SIGTERM, as an upgrade."""
        self.process.stop(grace=10)


def eventually(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until `condition` holds or stops failing an assertion; the last failure is what the test then shows."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            assert condition(), f"not within {seconds:.0f} s"
            return
        except (AssertionError, LookupError, ValueError, KubectlError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


class World:
    """One namespace as its users, its scheduler and its kubelet see it."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.here = ("-n", namespace)

    def apply(self, name: str = "demo", **spec: Any) -> None:
        """What a user writes; on the CPU unless `resources` says otherwise."""
        defaults = {"model": "hf://org/name", "resources": {"limits": {"cpu": "1000m"}}}
        manifest = {"apiVersion": "paceline.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": name}}
        self.kubectl.apply({**manifest, "spec": {**defaults, **spec}}, namespace=self.namespace)

    def get(self, kind: str, name: str = "demo") -> dict[str, Any]:
        """One object."""
        return self.kubectl.get(kind, name, *self.here)

    def list(self, kinds: str, selector: str = OURS) -> list[dict[str, Any]]:
        """Objects that the operator made."""
        items: list[dict[str, Any]] = self.kubectl.get(kinds, *self.here, "-l", selector)["items"]
        return items

    def verdict(self, kind: str = "Ready", name: str = "demo") -> tuple[str, str]:
        """Status and reason of a condition."""
        conditions = {one["type"]: one for one in self.get("llm", name)["status"]["conditions"]}
        return conditions[kind]["status"], conditions[kind]["reason"]

    def pod(self) -> dict[str, Any]:
        """The newest pod of any service here."""
        pods = [pod for pod in self.list("pods") if "deletionTimestamp" not in pod["metadata"]]
        return max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def report(self, pod: dict[str, Any], *, ready: bool = False, address: str = "", **container: Any) -> None:
        """What the kubelet says of a pod."""
        running = {"name": "server", "image": "i", "imageID": "", "ready": ready, "restartCount": 0}
        state = {"started": ready, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
        status = {
            "phase": "Running",
            "conditions": [{"type": kind, "status": str(ready)} for kind in ("Ready", "ContainersReady")],
            "containerStatuses": [{**running, **state, **container}],
            **({"podIP": address} if address else {}),
        }
        name = pod["metadata"]["name"]
        patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
        self.kubectl("patch", "pod", name, *self.here, *patch)

    def serve(self) -> None:
        """Make the newest pod ready and wait until the service is."""
        eventually(self.pod)
        self.report(self.pod(), ready=True)
        eventually(lambda: self.verdict() == ("True", "Serving"))

    def versions(self) -> dict[str, str]:
        """The resourceVersion of everything that the operator could write."""
        objects = [*self.list(CHILDREN), *self.kubectl.get("llm", *self.here)["items"]]
        return {f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for one in objects}

    def events(self) -> list[dict[str, Any]]:
        """The events about LLMServices."""
        about = "--field-selector=involvedObject.kind=LLMService"
        items: list[dict[str, Any]] = self.kubectl.get("events", *self.here, about)["items"]
        return items
