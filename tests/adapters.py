"""The adapter under test, as the chart installs it, and services of which a test is operator, node and servers.

There are no nodes. Pods are objects whose status a test writes, and this process serves their /metrics; the API server
reaches the adapter through a Service of type ExternalName.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cluster.api_server import ApiServer
from cluster.process import Process, free_port

from paceline_operator import names
from paceline_operator.desired.hpa import render_hpa
from paceline_operator.spec import parse_service

ROOT = Path(__file__).parents[1]
PACELINE = Path(sys.executable).parent / "paceline"
API_SERVICE = "v1beta2.custom.metrics.k8s.io"
METRICS = "/apis/custom.metrics.k8s.io/v1beta2"
RESOURCE = f"{names.PLURAL}.{names.GROUP}"
HERE = "adapter-test"


def eventually(check: Callable[[], object], seconds: float = 60) -> None:
    """Return once `check` gives something true; else fail with what it gave last.

    The controller manager learns of a new CRD every 30 s: the first HPA of a test run waits for that.
    """
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"still {found!r} after {seconds:.0f} s"
        time.sleep(0.2)


class Server:
    """A model server's /metrics, with the numbers that a test wants."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.waiting = self.running = 0
        self.first_tokens: list[float] = []  # seconds each
        self.broken = False
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(500 if server.broken else 200)
                self.end_headers()
                self.wfile.write(server.exposition().encode())

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self._http = ThreadingHTTPServer((host, port), Handler)
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def exposition(self) -> str:
        """Prometheus text."""
        lines = [f"paceline_requests_waiting {self.waiting}", f"paceline_requests_running {self.running}"]
        for bound in (0.5, 1.0, 5.0, float("inf")):
            count = sum(seconds <= bound for seconds in self.first_tokens)
            lines.append(f'paceline_ttft_seconds_bucket{{le="{"+Inf" if bound == float("inf") else bound}"}} {count}')
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()


@dataclass
class Adapter:
    """The installed adapter: its process, and what it takes to ask it."""

    server: ApiServer
    process: Process
    port: int
    command: list[str]
    logs: Path

    def metric(self, namespace: str, name: str, metric: str) -> str:
        """The value as the API server gives it."""
        path = (
            f"/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}/{names.PLURAL}.{names.GROUP}/{name}/{metric}"
        )
        (item,) = json.loads(self.server.kubectl("get", "--raw", path))["items"]
        value: str = item["value"]
        return value

    def available(self) -> bool:
        """Whether the API server trusts and reaches the adapter."""
        status = self.server.kubectl.get("apiservice", API_SERVICE).get("status", {})
        return any(one["type"] == "Available" and one["status"] == "True" for one in status.get("conditions", ()))

    def bundle(self) -> bytes:
        """The authorities that the API server trusts."""
        return base64.b64decode(self.server.kubectl.get("apiservice", API_SERVICE)["spec"].get("caBundle", ""))

    def restart(self) -> None:
        """End the process and start another."""
        self.process.stop()
        self.process = Process("adapter", self.command, self.logs)


@contextlib.contextmanager
def installed(api_server: ApiServer, helm_program: str, folder: Path) -> Iterator[Adapter]:
    """The chart's objects on the API server, and one adapter process that has the chart's rights and no others."""
    kubectl, port = api_server.kubectl, free_port()
    kubectl("apply", "-f", str(ROOT / "crds/llmservices.paceline.dev.yaml"))
    kubectl("wait", "--for=condition=Established", "crd/llmservices.paceline.dev")
    environment = os.environ | {"KUBECONFIG": str(api_server.kubeconfig), "HELM_NAMESPACE": HERE}
    switches = ["--set", "crd.install=false,operator.replicas=0,adapter.replicas=0", "--create-namespace"]
    subprocess.run(
        [helm_program, "install", "paceline", str(ROOT / "helm/paceline"), *switches],
        env=environment, check=True, capture_output=True,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(kubectl, "delete", "namespace", HERE)
        stack.callback(
            subprocess.run, [helm_program, "uninstall", "paceline"], env=environment, check=True, capture_output=True
        )
        outside = {"spec": {"type": "ExternalName", "externalName": "localhost", "clusterIP": None, "clusterIPs": None}}
        kubectl("patch", "service", "paceline-adapter", "-n", HERE, "--type=merge", "-p", json.dumps(outside))
        to_port = {"spec": {"service": {"port": port}}}
        kubectl("patch", "apiservice", API_SERVICE, "--type=merge", "-p", json.dumps(to_port))
        token = kubectl("create", "token", "paceline-adapter", "-n", HERE).strip()
        kubeconfig = api_server.kubeconfig_for(token, folder / "kubeconfig")
        command = [
            str(PACELINE), "adapter", f"--kubeconfig={kubeconfig}", f"--namespace={HERE}", "--host=127.0.0.1",
            f"--port={port}", "--interval-seconds=0.5",
        ]  # fmt: skip
        running = Adapter(api_server, Process("adapter", command, folder / "log"), port, command, folder / "log")
        stack.callback(lambda: running.process.stop())
        running.process.wait_until(running.available, seconds=30)
        yield running


@dataclass
class Service:
    """An LLMService whose status and pods the test writes in the operator's place."""

    server: ApiServer
    namespace: str
    name: str
    spec: dict[str, Any]
    servers: list[Server] = field(default_factory=list)

    def create(self) -> None:
        """Create it, with one pod."""
        self.server.kubectl.apply(
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": {"name": self.name},
                "spec": {"model": "hf://a/b", **self.spec},
            },
            namespace=self.namespace,
        )
        self.add_pod()

    def add_pod(self) -> Server:
        """Add a pod that this process answers for."""
        server = Server()
        pod = f"{names.child_name(self.name)}-{len(self.servers)}"
        self.servers.append(server)
        port = {"name": names.PORT_NAME, "containerPort": server.port}
        self.server.kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": pod, "labels": names.common_labels(self.name)},
                "spec": {"containers": [{"name": names.CONTAINER, "image": "none.invalid/none:1", "ports": [port]}]},
            },
            namespace=self.namespace,
        )
        conditions = [{"type": "Ready", "status": "True"}]
        self._patch_status("pod", pod, {"phase": "Running", "podIP": "127.0.0.1", "conditions": conditions})
        self.set_replicas(len(self.servers))
        return server

    def set_replicas(self, replicas: int) -> None:
        """Write what an HPA needs of the status."""
        selector = names.selector_string(self.name)
        self._patch_status("llmservice", self.name, {"replicas": replicas, "selector": selector})

    def close(self) -> None:
        """Stop answering for its pods."""
        for server in self.servers:
            server.close()

    def wanted(self) -> int:
        """The replicas that the HPA asks for."""
        replicas: int = self._get()["spec"]["replicas"]
        return replicas

    def autoscale(self) -> None:
        """Create the HPA that the operator would."""
        hpa = render_hpa(parse_service(self._get()))
        assert hpa
        self.server.kubectl.apply(hpa, namespace=self.namespace)

    def hpa(self) -> str:
        """What `kubectl get hpa` prints."""
        return self.server.kubectl("get", "hpa", names.child_name(self.name), "-n", self.namespace, "--no-headers")

    def _get(self) -> dict[str, Any]:
        return self.server.kubectl.get("llmservice", self.name, "-n", self.namespace)

    def _patch_status(self, kind: str, name: str, status: dict[str, Any]) -> None:
        body = json.dumps({"status": status})
        where = ("-n", self.namespace, "--subresource=status", "--type=merge")
        self.server.kubectl("patch", kind, name, *where, "-p", body)
