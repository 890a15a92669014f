"""One path through the whole product, on a real node: chart, LLMService, requests, scaling, deletion."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from cluster.seam import Cluster
from e2e.installation import Images
from e2e.live_service import PORT, LiveService, eventually, everything

pytestmark = pytest.mark.timeout(600)

TARGET = 4  # requests a replica, above which a second one starts
LONG = {
    "messages": [{"role": "user", "content": "Tell me a very long story about a lighthouse."}],
    "stream": True,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
ONE_OR_TWO = {
    "engine": {"threads": 1, "maxModelLen": 4096, "cpuMemoryGb": 1.0},
    "autoscaling": {
        "minReplicas": 1,
        "maxReplicas": 2,
        "targetQueueDepth": TARGET,
        "scaleDownStabilizationSeconds": 5,
    },
    "drainSeconds": 240,
}


@pytest.fixture(scope="module")
def smollm2(paceline: Cluster, images: Images) -> Iterator[LiveService]:
    """The sample's LLMService, applied and Ready, with an autoscaler of one to two replicas."""
    with paceline.kubectl.namespace("e2e") as namespace:
        service = LiveService.sample(paceline, namespace, images.spec, ONE_OR_TWO)
        service.apply()
        service.wait("condition=Ready", 180)
        yield service


def test_a_pod_is_ready_only_after_its_warm_up(paceline: Cluster, images: Images, namespace: str) -> None:
    """Running and not Ready while it loads, as its condition says; Ready once a pass through the model is done."""
    service = LiveService.sample(paceline, namespace, images.spec)
    service.apply()
    eventually(lambda: [pod for pod in service.pods() if pod["status"]["phase"] == "Running"], 60)
    (pod,) = service.pods()
    assert ready_since(pod) is None
    assert service.condition("Ready")["status"] == "False"

    service.wait("condition=Ready", 180)
    (pod,) = service.pods()
    started = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    phases = startup_phases(service)
    assert list(phases) == ["start_engine", "load_weights", "allocate_kv_cache", "warmup"]
    became_ready = ready_since(pod)
    assert became_ready is not None
    running_unready = (became_ready - datetime.fromisoformat(started)).total_seconds()
    assert running_unready + 1 >= sum(phases.values())  # Kubernetes' times are whole seconds


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_is_answered_through_the_service(smollm2: LiveService, stream: bool) -> None:
    question = {"role": "user", "content": "Name the capital city of France."}
    (answer,) = smollm2.ask({"messages": [question], "temperature": 0, "max_tokens": 32, "stream": stream})
    assert answer["error"] is None
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert (answer["pieces"] > 1) is stream


def test_queue_depth_scales_to_two_replicas_and_back_without_cutting_a_stream(smollm2: LiveService) -> None:
    """Eight long requests start a second pod, which goes again with a stream still running in it."""
    wave = [{**LONG, "max_tokens": 700}] * 8
    with contextlib.ExitStack() as stack:
        first_answers = stack.enter_context(smollm2.asking(*wave))
        shown = eventually(lambda: queue_depth_shown(smollm2), 60)
        assert shown > TARGET
        smollm2.wait("jsonpath={.status.readyReplicas}=2", 180)

        newest = smollm2.pods()[-1]
        own_url = f"http://{newest['status']['podIP']}:{PORT}"
        last_answer = stack.enter_context(smollm2.asking({**LONG, "max_tokens": 2500}, url=own_url))
        answers = first_answers()
        smollm2.wait("jsonpath={.spec.replicas}=1", 120)
        eventually(lambda: terminating(smollm2, newest["metadata"]["name"]), 60)
        answers += last_answer()
    smollm2.wait("jsonpath={.status.replicas}=1", 60)

    assert [answer["error"] for answer in answers] == [None] * 9
    assert [answer["finish_reason"] for answer in answers] == ["length"] * 9
    assert [answer["tokens"] for answer in answers] == [700] * 8 + [2500]


def test_deleting_an_llmservice_leaves_none_of_its_children(paceline: Cluster, images: Images, namespace: str) -> None:
    before = everything(paceline)
    service = LiveService.sample(paceline, namespace, images.spec, ONE_OR_TWO)
    service.apply()
    eventually(lambda: [pod for pod in service.pods() if pod["status"]["phase"] == "Running"], 60)
    children = {one.split()[0] for one in everything(paceline) - before}
    assert children >= {"Deployment", "Service", "ConfigMap", "HorizontalPodAutoscaler", "Pod"}
    service.kubectl("delete", f"llm/{service.name}", "--timeout=60s")
    eventually(lambda: everything(paceline) <= before, 60)


def test_deleting_the_namespace_does_not_hang(paceline: Cluster, images: Images, namespace: str) -> None:
    service = LiveService.sample(paceline, namespace, images.spec)
    service.apply()
    eventually(lambda: service.pods(), 60)
    paceline.kubectl("delete", "namespace", namespace, "--timeout=60s")
    assert not paceline.kubectl.exists("namespace", namespace)


def ready_since(pod: dict[str, Any]) -> datetime | None:
    """When the pod became Ready; None while it is not."""
    (condition,) = (one for one in pod["status"]["conditions"] if one["type"] == "Ready")
    return datetime.fromisoformat(condition["lastTransitionTime"]) if condition["status"] == "True" else None


def startup_phases(service: LiveService) -> dict[str, float]:
    """Seconds of each start-up phase, as the server tells them on /metrics."""
    get = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"
    with service.cluster.reach(service.namespace, service.name, PORT) as url:
        text = service.cluster.run_inside("python3", "-c", get, f"{url}/metrics")
    found = re.findall(r'^paceline_startup_seconds\{.*phase="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {phase: float(seconds) for phase, seconds in found}


def queue_depth_shown(service: LiveService) -> float | None:
    """The queue depth a replica that `kubectl get hpa` prints, when it is above zero."""
    line = service.kubectl("get", "hpa", service.name, "--no-headers")
    shown = re.search(rf"(\d+)(m?)/{TARGET} \(avg\)", line)
    if not shown:
        return None
    return int(shown[1]) / (1000 if shown[2] else 1)


def terminating(service: LiveService, pod: str) -> bool:
    """Whether this pod is on its way out."""
    return any(one["metadata"]["name"] == pod and "deletionTimestamp" in one["metadata"] for one in service.pods())
