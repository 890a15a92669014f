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
from e2e.live_service import PORT, LiveService, eventually, everything, settled

pytestmark = pytest.mark.timeout(600)

TARGET = 4  # requests a replica, above which a second one starts
ONE_OR_TWO = {
    "engine": {"threads": 1, "maxModelLen": 4096, "cpuMemoryGb": 1.0},
    "autoscaling": {
        "minReplicas": 1,
        "maxReplicas": 2,
        "targetQueueDepth": TARGET,
        "scaleDownStabilizationSeconds": 5,
    },
    "drainSeconds": 600,
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


@pytest.mark.timeout(1200)
def test_queue_depth_scales_to_two_replicas_and_back_without_cutting_a_stream(smollm2: LiveService) -> None:
    """Eight long requests start a second pod; when they end, a pod goes, and not before its own last stream is done."""
    pace, start = tokens_per_second(smollm2), sum(startup_phases(smollm2).values())
    wave_tokens = int(pace * start * 0.6)  # eight together are slower, and outlast a start
    last_tokens = int(pace * (start + 15))  # outlasts the wave, and what HPA and operator take to see its end
    with contextlib.ExitStack() as stack:
        wave = stack.enter_context(smollm2.asking(*[long_request(wave_tokens)] * 8))
        eventually(lambda: queue_depth_shown(smollm2) >= TARGET, 60)  # 8 in one pod, or 4 in each of two
        smollm2.wait("jsonpath={.status.readyReplicas}=2", 300)

        last = {
            pod["metadata"]["name"]: stack.enter_context(smollm2.asking(long_request(last_tokens), pod=pod))
            for pod in smollm2.pods()
        }
        assert len(last) == 2
        answers = wave.answers()
        (going,) = eventually(lambda: terminating(smollm2), 120)
        assert not last[going].all_answered(), "the stream was over before its pod had to go"
        for stream in last.values():
            answers += stream.answers()
    smollm2.wait("jsonpath={.status.replicas}=1", 60)

    assert [answer["error"] for answer in answers] == [None] * 10
    assert [answer["finish_reason"] for answer in answers] == ["length"] * 10
    assert [answer["tokens"] for answer in answers] == [wave_tokens] * 8 + [last_tokens] * 2


def test_deleting_an_llmservice_leaves_none_of_its_children(paceline: Cluster, images: Images, namespace: str) -> None:
    before = everything(paceline)
    service = LiveService.sample(paceline, namespace, images.spec, ONE_OR_TWO)
    service.apply()
    eventually(lambda: [pod for pod in service.pods() if pod["status"]["phase"] == "Running"], 60)
    children = {one.split()[0] for one in everything(paceline) - before}
    assert children >= {
        "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Pod", "PodDisruptionBudget", "Service",
    }  # fmt: skip
    service.kubectl("delete", f"llm/{service.name}", "--timeout=60s")
    assert settled(lambda: everything(paceline) - before, set(), 60) == set()


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


def tokens_per_second(service: LiveService) -> float:
    """How fast one stream comes on this machine, with whatever else it is doing."""
    (answer,) = service.ask(long_request(64))
    return float(answer["tokens"] / answer["seconds"])


def queue_depth_shown(service: LiveService) -> float:
    """The queue depth of a replica that `kubectl get hpa` prints; 0 while it prints none."""
    line = service.kubectl("get", "hpa", service.name, "--no-headers")
    shown = re.search(rf"(\d+)(m?)/{TARGET} \(avg\)", line)
    return int(shown[1]) / (1000 if shown[2] else 1) if shown else 0.0


def terminating(service: LiveService) -> list[str]:
    """The names of the pods that are on their way out."""
    return [pod["metadata"]["name"] for pod in service.pods() if "deletionTimestamp" in pod["metadata"]]


def long_request(tokens: int) -> dict[str, Any]:
    """A streamed request that ends after exactly so many tokens."""
    question = {"role": "user", "content": "Tell me a long story about a lighthouse."}
    return {
        "messages": [question],
        "stream": True,
        "temperature": 0,
        "max_tokens": tokens,
        "extra_body": {"ignore_eos": True},
    }
