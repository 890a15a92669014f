"""API keys in a Secret, on a real node: mounted by the kubelet, followed by the server, no reason to roll pods."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster.seam import Cluster
from e2e.installation import Images
from e2e.live_service import LiveService, eventually

pytestmark = pytest.mark.timeout(600)

TENANT = {"name": "chat", "keysFrom": {"secretKeyRef": {"name": "api-keys", "key": "chat"}}}
OLD_KEY, NEW_KEY = "sk-the-first-key-of-chat", "sk-another-key-of-chat"
QUESTION = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def test_keys_of_a_secret_open_the_service_and_a_changed_secret_is_taken_over_by_the_pod_that_runs(
    paceline: Cluster, images: Images, namespace: str
) -> None:
    service = LiveService.sample(paceline, namespace, images.spec, {"tenants": [TENANT]})
    write_keys(service, OLD_KEY)
    service.apply()
    service.wait("condition=Ready", 180)
    (pod,) = service.pods()
    assert refusal(service, OLD_KEY) is None
    assert "the API key is not known here" in str(refusal(service, NEW_KEY))

    write_keys(service, NEW_KEY)
    # The kubelet looks at a pod again once a minute, or when the pod changes; the server at its files every 10 s.
    service.kubectl("annotate", "pod", pod["metadata"]["name"], "test/changed=yes")
    eventually(lambda: refusal(service, NEW_KEY) is None, 180)
    assert "the API key is not known here" in str(refusal(service, OLD_KEY))
    assert started(service.pods()) == started([pod])


def write_keys(service: LiveService, key: str) -> None:
    """Write the Secret with one key of the tenant."""
    metadata = {"name": "api-keys"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"chat": f"{key}\n"}}
    service.kubectl("apply", "-f", "-", input=json.dumps(secret))


def refusal(service: LiveService, key: str) -> str | None:
    """What a request with this key is refused with; None when it is answered."""
    (answer,) = service.ask(QUESTION, key=key)
    error: str | None = answer["error"]
    return error


def started(pods: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """The pods and how often their servers were started again."""
    return [(pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in pods]
