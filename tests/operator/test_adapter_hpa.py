"""The adapter behind a real API server: installed by the chart, read by a real HPA, closed to others.

There are no nodes here. Pods are objects whose status a test writes, and this process serves their /metrics; the API
server reaches the adapter through a Service of type ExternalName.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cluster.access import KubectlError
from cluster.api_server import ApiServer
from cluster.process import Process, free_port

from paceline_operator import names
from paceline_operator.desired.hpa import render_hpa
from paceline_operator.spec import parse_service

ROOT = Path(__file__).parents[2]
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

    def __init__(self) -> None:
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

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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


@pytest.fixture(scope="module")
def adapter(api_server: ApiServer, helm_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapter]:
    """The chart's objects on the API server, and one adapter process that has the chart's rights and no others."""
    kubectl, folder, port = api_server.kubectl, tmp_path_factory.mktemp("adapter"), free_port()
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


@pytest.fixture
def make_service(api_server: ApiServer, namespace: str) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(name: str = "demo", **spec: Any) -> Service:
        made.append(Service(api_server, namespace, name, spec))
        made[-1].create()
        return made[-1]

    yield make
    for service in made:
        for server in service.servers:
            server.close()


AUTOSCALING = {
    "maxReplicas": 4,
    "targetQueueDepth": 4,
    "ttftObjectiveSeconds": 1,
    "scaleDownStabilizationSeconds": 0,
}


def test_a_real_hpa_scales_up_on_queue_depth_and_down_again(
    adapter: Adapter, make_service: Callable[..., Service]
) -> None:
    service = make_service(autoscaling=AUTOSCALING)
    service.servers[0].waiting, service.servers[0].running = 2, 4
    service.autoscale()
    eventually(lambda: service.wanted() == 2)
    assert "6/4 (avg)" in service.hpa()
    service.add_pod()
    service.servers[0].waiting = service.servers[0].running = 0
    eventually(lambda: service.wanted() == 1)
    assert "0/4 (avg)" in service.hpa()


def test_a_real_hpa_scales_up_on_slow_first_tokens(adapter: Adapter, make_service: Callable[..., Service]) -> None:
    service = make_service(autoscaling=AUTOSCALING)
    (server,) = service.servers
    server.running = 1
    eventually(lambda: adapter.metric(service.namespace, "demo", "queue_depth") == "1")  # the pod has been seen
    server.first_tokens = [4.0] * 10
    service.autoscale()
    eventually(lambda: service.wanted() == 2)
    assert adapter.metric(service.namespace, "demo", "ttft_pressure") == "2"


def test_a_pod_that_stops_answering_does_not_take_replicas_away(
    adapter: Adapter, make_service: Callable[..., Service]
) -> None:
    """Two requests are half a replica's worth: only that the rest is unknown keeps the second replica."""
    service = make_service(autoscaling=AUTOSCALING, replicas=2)
    service.add_pod().running = 2
    eventually(lambda: adapter.metric(service.namespace, "demo", "queue_depth") == "2")
    service.servers[1].broken = True
    eventually(lambda: adapter.metric(service.namespace, "demo", "ttft_pressure") == "1")
    service.autoscale()
    eventually(lambda: "1/4 (avg), 1/1" in service.hpa())
    assert service.wanted() == 2
    service.servers[1].broken = False
    eventually(lambda: service.wanted() == 1)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "x" * 100])
def test_services_with_awkward_names_are_found(
    adapter: Adapter, make_service: Callable[..., Service], name: str
) -> None:
    service = make_service(name)
    service.servers[0].running = 5
    eventually(lambda: adapter.metric(service.namespace, name, "queue_depth") == "5")


def test_a_new_service_has_numbers_at_once_and_a_deleted_one_is_not_found(
    adapter: Adapter, make_service: Callable[..., Service]
) -> None:
    service = make_service()
    assert adapter.metric(service.namespace, "demo", "queue_depth") == "0"
    adapter.server.kubectl("delete", "llmservice", "demo", "-n", service.namespace)

    def gone() -> bool:
        try:
            adapter.metric(service.namespace, "demo", "queue_depth")
        except KubectlError as error:
            return "NotFound" in error.stderr
        return False

    eventually(gone)


def test_the_metrics_are_in_discovery(adapter: Adapter) -> None:
    found = json.loads(adapter.server.kubectl("get", "--raw", METRICS))
    assert {one["name"] for one in found["resources"]} == {
        "llmservices.paceline.dev/queue_depth",
        "llmservices.paceline.dev/ttft_pressure",
    }
    assert "custom.metrics.k8s.io/v1beta2" in adapter.server.kubectl("api-versions").split()


def test_a_user_without_the_right_gets_no_metrics(
    adapter: Adapter, make_service: Callable[..., Service], tmp_path: Path
) -> None:
    service = make_service()
    token = adapter.server.kubectl("create", "token", "default", "-n", service.namespace).strip()
    kubeconfig = adapter.server.kubeconfig_for(token, tmp_path / "kubeconfig")
    as_default = type(adapter.server.kubectl)(adapter.server.kubectl.program, kubeconfig)
    with pytest.raises(KubectlError, match="Forbidden"):
        as_default("get", "--raw", f"{METRICS}/namespaces/{service.namespace}/{RESOURCE}/demo/queue_depth")


def test_nobody_gets_past_the_api_server(adapter: Adapter) -> None:
    trust = ssl.create_default_context(cadata=adapter.bundle().decode())
    trust.check_hostname = False
    base = f"https://127.0.0.1:{adapter.port}"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{base}{METRICS}", context=trust)
    assert refused.value.code == 401
    with urllib.request.urlopen(f"{base}/healthz", context=trust) as response:
        assert response.read() == b"ok"


def test_a_restarted_adapter_keeps_its_certificate(adapter: Adapter, make_service: Callable[..., Service]) -> None:
    service = make_service()
    bundle = adapter.bundle()
    adapter.restart()

    def answers() -> bool:
        with contextlib.suppress(KubectlError):
            return adapter.metric(service.namespace, "demo", "queue_depth") == "0"
        return False

    eventually(answers)
    assert adapter.bundle() == bundle
