"""The adapter behind a real API server: found, read by whom it may be, closed to others."""

from __future__ import annotations

import contextlib
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from adapters import METRICS, RESOURCE, Adapter, Service, eventually
from cluster.access import KubectlError


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
