"""Which pods belong to which service, and what state they are in."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from paceline_operator import names
from paceline_operator.adapter.discover import PODS_PATH, SERVICES_PATH, assign, discover, read_pod
from paceline_operator.adapter.testing import FakeObjects
from paceline_operator.cluster import Key
from paceline_operator.local.pod import PodState, Running, render

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
RECENT = "2030-01-01T11:59:00Z"


def service(name: str, namespace: str = "default", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"model": "hf://a/b", **spec}}


def pod(of: str, namespace: str = "default", *, uid: str = "p1", ready: bool = False, **status: Any) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {
            "uid": uid,
            "namespace": namespace,
            "labels": names.common_labels(of),
            "creationTimestamp": RECENT,
        },
        "spec": {
            "containers": [
                {"name": "sidecar", "ports": [{"name": "http", "containerPort": 1}]},
                {"name": names.CONTAINER, "ports": [{"name": "http", "containerPort": 8000}]},
            ],
        },
        "status": {"phase": "Running", "podIP": "10.0.0.7", "conditions": conditions, **status},
    }


def waiting(reason: str) -> dict[str, Any]:
    return {"containerStatuses": [{"name": names.CONTAINER, "state": {"waiting": {"reason": reason}}}]}


def test_a_service_gets_the_pods_of_its_name_in_its_namespace_only() -> None:
    services = [service("a"), service("a", "other"), service("b")]
    pods = [pod("a", uid="1"), pod("a", "other", uid="2"), pod("a", uid="3"), pod("gone", uid="4")]
    found = assign(services, pods, NOW)
    assert {str(key): [p.uid for p in value.pods] for key, value in found.items()} == {
        "default/a": ["1", "3"],
        "other/a": ["2"],
        "default/b": [],
    }


@pytest.mark.parametrize("name", ["qwen2.5-7b", "7b", "x" * 63, "x" * 64, "a." * 100 + "b"])
def test_awkward_names_find_their_pods_too(name: str) -> None:
    assert [p.uid for p in assign([service(name)], [pod(name)], NOW)[Key("default", name)].pods] == ["p1"]


def test_the_objective_is_the_services_own_or_the_default() -> None:
    found = assign([service("a", autoscaling={"maxReplicas": 2, "ttftObjectiveSeconds": 0.5}), service("b")], [], NOW)
    assert [value.ttft_objective_seconds for value in found.values()] == [0.5, 2.0]


def test_a_terminating_pod_is_left_out() -> None:
    leaving = pod("a", ready=True)
    leaving["metadata"]["deletionTimestamp"] = RECENT
    assert assign([service("a")], [leaving], NOW)[Key("default", "a")].pods == ()


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_has_ended_is_left_out(phase: str) -> None:
    """Its record keeps an address, which a pod that runs may have been given since."""
    record = pod("a", uid="record", phase=phase)
    found = assign([service("a")], [record, pod("a", uid="runs")], NOW)
    assert [p.uid for p in found[Key("default", "a")].pods] == ["runs"]


def test_metrics_are_at_the_pods_address_and_the_servers_port() -> None:
    assert read_pod(pod("a"), 1800, NOW).metrics_url == "http://10.0.0.7:8000/metrics"
    assert read_pod(pod("a", podIP="fd00::7"), 1800, NOW).metrics_url == "http://[fd00::7]:8000/metrics"
    assert read_pod(pod("a", podIP=None), 1800, NOW).metrics_url is None


def test_a_placed_pod_that_is_not_ready_is_loading() -> None:
    starting = read_pod(pod("a", phase="Pending", **waiting("ContainerCreating")), 1800, NOW)
    running = read_pod(pod("a"), 1800, NOW)
    assert (starting.loading, running.loading) == (True, True)


def test_a_ready_pod_is_not_loading() -> None:
    serving = read_pod(pod("a", ready=True), 1800, NOW)
    assert (serving.ready, serving.loading) == (True, False)


def test_a_pod_without_a_node_is_not_loading() -> None:
    waits = [{"type": "PodScheduled", "status": "False", "message": "1 Insufficient nvidia.com/gpu"}]
    assert not read_pod(pod("a", phase="Pending", podIP=None, conditions=waits), 1800, NOW).loading
    assert not read_pod(pod("a", phase="Pending", podIP=None, conditions=[]), 1800, NOW).loading


def test_a_pod_of_local_mode_is_loading_like_any_other() -> None:
    """Its status is the local kubelet's, and there are no nodes to be named in its specification."""
    started = datetime(2030, 1, 1, 11, 59, tzinfo=UTC)
    status = render(PodState(container=Running(started), started_at=started, changed_at=started), "image")
    assert read_pod({**pod("a"), "status": status}, 1800, NOW).loading


@pytest.mark.parametrize("reason", ["CrashLoopBackOff", "ImagePullBackOff", "CreateContainerConfigError"])
def test_a_pod_that_backs_off_is_not_loading(reason: str) -> None:
    assert not read_pod(pod("a", **waiting(reason)), 1800, NOW).loading


def test_a_pod_beyond_its_startup_budget_is_not_loading() -> None:
    assert read_pod(pod("a"), 60, NOW).loading
    assert not read_pod(pod("a"), 60, NOW + timedelta(seconds=1)).loading


def test_a_server_that_is_started_again_after_days_is_loading_for_as_long_as_any_other() -> None:
    """It served until a minute ago; the pod itself is much older than its start-up budget."""
    restarted = pod("a", startTime="2029-12-25T00:00:00Z")
    restarted["status"]["conditions"][1]["lastTransitionTime"] = RECENT
    assert read_pod(restarted, 60, NOW).loading
    assert not read_pod(restarted, 60, NOW + timedelta(seconds=1)).loading


async def test_only_pods_that_the_operator_made_are_listed() -> None:
    source = FakeObjects()
    stranger = pod("a", uid="stranger")
    stranger["metadata"]["labels"][names.LABEL_MANAGED_BY] = "Helm"
    source.collections = {SERVICES_PATH: [service("a")], PODS_PATH: [pod("a"), stranger]}
    found = await discover(source, NOW)
    assert [p.uid for p in found[Key("default", "a")].pods] == ["p1"]
