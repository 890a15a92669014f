"""One service's life with the real operator on a real API server; pods are given their status by the tests."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.api_server import ApiServer
from operators import CHILDREN, World, eventually

pytestmark = pytest.mark.usefixtures("operator")


def test_a_service_is_served_and_leaves_nothing(world: World) -> None:
    """From kubectl apply to Ready, as `kubectl wait` sees it, and away again."""
    world.apply(autoscaling={"maxReplicas": 3})
    eventually(lambda: len(world.list(CHILDREN)) == 5)
    service = world.get("llm")
    for child in world.list(CHILDREN):
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (service["metadata"]["uid"], True)
        assert child["metadata"]["namespace"] == world.namespace
    eventually(lambda: world.verdict() == ("False", "Starting"))
    world.report(world.pod())
    eventually(lambda: world.verdict() == ("False", "Loading"))
    world.report(world.pod(), ready=True)
    world.kubectl("wait", "--for=condition=Ready", "llm/demo", *world.here, "--timeout=20s")
    status = world.get("llm")["status"]
    assert status["url"] == f"http://demo.{world.namespace}.svc:8000"
    assert (status["replicas"], status["readyReplicas"], status["observedGeneration"]) == (1, 1, 1)
    assert "finalizers" not in world.get("llm")["metadata"]
    known = {"kubectl.kubernetes.io/last-applied-configuration"}
    assert set(world.get("llm")["metadata"]["annotations"]) == known
    reasons = {event["reason"] for event in world.events()}
    assert {"CreatingPods", "Loading", "Serving"} <= reasons
    world.kubectl("delete", "llm", "demo", *world.here, "--timeout=10s")
    # The garbage collector looks for new kinds, of which LLMService is one here, every 30 s.
    eventually(lambda: not world.list(f"{CHILDREN},replicaset"), seconds=60)


def test_the_pods_own_failure_is_shown_and_goes_when_it_is_corrected(world: World) -> None:
    """The server's last words in Ready, the event, and the way back by an edit while pods are unhealthy."""
    world.apply(model="hf://no/such")
    eventually(world.pod)
    failing = world.pod()
    ended = {"exitCode": 1, "reason": "Error", "message": "ModelNotFound: hf://no/such is not on the hub (404)"}
    last = {"terminated": {**ended, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:02Z"}}
    world.report(failing, state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=last, restartCount=1)
    eventually(lambda: world.verdict() == ("False", "ModelNotFound"))
    (condition,) = (one for one in world.get("llm")["status"]["conditions"] if one["type"] == "Ready")
    assert "hf://no/such is not on the hub (404)" in condition["message"]
    assert any(event["reason"] == "ModelNotFound" and event["type"] == "Warning" for event in world.events())
    world.apply(model="hf://org/name")
    eventually(lambda: world.pod()["metadata"]["name"] != failing["metadata"]["name"])
    world.serve()
    assert world.verdict("Degraded") == ("False", "AsExpected")


def test_a_missing_secret_is_named(world: World) -> None:
    """The kubelet's words, with the name of what is missing and nothing of what it holds."""
    world.apply(modelSecretRef={"name": "hub-token"})
    eventually(world.pod)
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "hub-token" not found'}
    world.report(world.pod(), state={"waiting": waiting})
    eventually(lambda: world.verdict() == ("False", "CreateContainerConfigError"))
    world.serve()


def test_a_refused_pod_template_is_explained(world: World) -> None:
    """A field of the overlay that no pod has is refused by the API server, and the condition says which."""
    world.apply(template={"spec": {"containers": [{"name": "server", "imagee": "x"}]}})
    eventually(lambda: world.verdict() == ("False", "ChildRefused"))
    (condition,) = (one for one in world.get("llm")["status"]["conditions"] if one["type"] == "Ready")
    assert "imagee" in condition["message"]
    world.apply(template={"spec": {}})
    eventually(lambda: world.verdict() == ("False", "Starting"))


def test_switching_autoscaling_off_removes_the_hpa_and_keeps_the_replicas(world: World) -> None:
    """On again, it comes back."""
    world.apply(autoscaling={"maxReplicas": 4})
    eventually(lambda: world.list("hpa"))
    world.apply(replicas=2)
    eventually(lambda: not world.list("hpa"))
    eventually(lambda: world.get("deployment")["spec"]["replicas"] == 2)
    assert world.verdict("ScalingReady") == ("False", "AutoscalingOff")
    world.apply(replicas=2, autoscaling={"maxReplicas": 4})
    eventually(lambda: world.list("hpa"))
    assert world.get("deployment")["spec"]["replicas"] == 2


def test_a_child_deleted_by_hand_comes_back_and_a_changed_one_is_set_back(world: World) -> None:
    """At once, by the watch; the full list is minutes away."""
    world.apply()
    eventually(lambda: len(world.list(CHILDREN)) == 4)
    for kind in ("deployment", "service", "configmap"):
        ((name, uid),) = ((one["metadata"]["name"], one["metadata"]["uid"]) for one in world.list(kind))
        world.kubectl("delete", kind, name, *world.here)
        eventually(lambda kind=kind, uid=uid: uid not in str(world.list(kind)) and world.list(kind))
    world.kubectl("scale", "deployment/demo", "--replicas=5", *world.here)
    eventually(lambda: world.get("deployment")["spec"]["replicas"] == 1)


def test_a_configuration_stays_as_long_as_a_pod_of_it_may_run(world: World) -> None:
    """Through a rollout that does not get on, in which the old pod is lost too; then only the new one is left."""
    world.apply()
    world.serve()
    (before,) = world.list("configmap")

    def pods(*, old: bool) -> list[dict[str, Any]]:
        return [pod for pod in world.list("pods") if (before["metadata"]["name"] in str(pod["spec"])) is old]

    world.apply(engine={"maxModelLen": 512})
    eventually(lambda: (len(pods(old=True)), len(pods(old=False))) == (1, 1))
    world.kubectl("delete", "pod", pods(old=True)[0]["metadata"]["name"], *world.here)
    eventually(lambda: len(pods(old=True)) == 1)
    assert before["metadata"]["uid"] in {one["metadata"]["uid"] for one in world.list("configmap")}
    world.report(pods(old=False)[0], ready=True)
    eventually(lambda: world.verdict("Progressing") == ("False", "UpToDate"))
    eventually(lambda: len(world.list("configmap")) == 1)
    (after,) = world.list("configmap")
    assert after["metadata"]["name"] != before["metadata"]["name"]
    assert "max_model_len: 512" in str(after["data"])


def test_somebody_elses_object_is_left_alone(world: World) -> None:
    """The condition names it; once it is gone the service is made."""
    world.kubectl("create", "service", "clusterip", "demo", "--tcp=80:80", *world.here)
    before = world.get("service")
    world.apply()
    eventually(lambda: world.verdict() == ("False", "NameConflict"))
    assert world.get("service") == before
    assert not world.list("deployment,configmap,pdb")
    world.kubectl("delete", "service", "demo", *world.here)
    world.kubectl("annotate", "llm/demo", "note=look-again", *world.here)
    eventually(lambda: len(world.list(CHILDREN)) == 4)


@pytest.mark.parametrize("name", ["x", "qwen2.5-7b", "7b", "a" * 63, "b" * 64, "c" * 59 + "-" + "d" * 20, "e.f" * 84])
def test_every_name_that_is_accepted_is_served(world: World, name: str) -> None:
    """All children are made, with names and labels that the API server takes; the pod leads back to its service."""
    world.apply(name, autoscaling={"maxReplicas": 2})
    eventually(lambda: len(world.list(CHILDREN)) == 5)
    eventually(lambda: world.verdict(name=name) == ("False", "Starting"))
    world.report(world.pod(), ready=True)
    eventually(lambda: world.verdict(name=name) == ("True", "Serving"))


def test_a_namespace_with_services_can_be_deleted(api_server: ApiServer, world: World) -> None:
    """Nothing of ours holds it, and nothing is made again in it while it goes."""
    world.apply()
    eventually(lambda: len(world.list(CHILDREN)) == 4)
    api_server.kubectl("delete", "namespace", world.namespace, "--timeout=40s")
    assert not api_server.kubectl.exists("namespace", world.namespace)


def test_a_deleted_and_recreated_service_gets_children_of_its_own(world: World) -> None:
    """The predecessor's children are waited for, not adopted: the garbage collector would take them."""
    world.apply()
    eventually(lambda: len(world.list(CHILDREN)) == 4)
    before = {child["metadata"]["uid"] for child in world.list(CHILDREN)}
    world.kubectl("delete", "llm", "demo", *world.here, "--wait=false")
    world.apply()
    uid = world.get("llm")["metadata"]["uid"]

    def all_are_new() -> bool:
        children = world.list(CHILDREN)
        owners = {child["metadata"]["ownerReferences"][0]["uid"] for child in children}
        return len(children) == 4 and owners == {uid} and not before & {c["metadata"]["uid"] for c in children}

    eventually(all_are_new)
