"""One service from its first sight to its end, on a cluster in dictionaries."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from paceline_operator import reconcile as reconcile_module
from paceline_operator.cluster import Apply, Delete, EmitEvent, Key, Load, Manifest, PatchStatus
from paceline_operator.errors import StaleObservation
from paceline_operator.reconcile import reconcile
from paceline_operator.testing import NOW, FakeCluster, key_of, llmservice, make_pod

IMAGE = "registry.example/server:1"
NEW_IMAGE = "registry.example/server:2"
KEY = Key("default", "smollm2")


class Stage:
    """A service on a FakeCluster, and what its user does to it."""

    def __init__(self, **spec: Any) -> None:
        self.cluster = FakeCluster(llmservice(**spec))
        self.image = IMAGE
        self.now = NOW

    @property
    def service(self) -> Manifest:
        """The LLMService as stored."""
        return self.cluster.services[KEY]

    @property
    def deployment(self) -> Manifest:
        """The Deployment as stored."""
        return self.cluster.child(KEY, "Deployment")

    async def reconcile(self) -> list[Any]:
        """One pass; returns what it did."""
        self.cluster.take_actions()
        await reconcile(self.cluster, KEY, self.image, lambda: self.now)
        return self.cluster.take_actions()

    def edit(self, **spec: Any) -> None:
        """A user's change: the generation goes up. None removes a field."""
        self.service["metadata"]["generation"] += 1
        self.service["spec"] = {k: v for k, v in (self.service["spec"] | spec).items() if v is not None}

    def run_pods(self, *pods: Manifest) -> None:
        """What the kubelet reports from now on."""
        self.cluster.pods[KEY] = list(pods)

    def condition(self, kind: str = "Ready") -> dict[str, Any]:
        """One condition as stored."""
        conditions: dict[str, dict[str, Any]] = {c["type"]: c for c in self.service["status"]["conditions"]}
        return conditions[kind]

    def verdict(self, kind: str = "Ready") -> tuple[str, str]:
        """Status and reason of a condition."""
        return self.condition(kind)["status"], self.condition(kind)["reason"]


async def serving(**spec: Any) -> Stage:
    """A service whose replicas all serve."""
    stage = Stage(**spec)
    await stage.reconcile()
    replicas = stage.service["spec"].get("replicas", 1)
    stage.run_pods(*(make_pod(stage.deployment, f"pod-{n}", ready=True) for n in range(replicas)))
    await stage.reconcile()
    return stage


def kinds(actions: list[Any], action: type = Apply) -> list[str]:
    """Kinds of the children that were applied or deleted, in order."""
    return [a.manifest["kind"] if isinstance(a, Apply) else a.kind for a in actions if isinstance(a, action)]


def events(actions: list[Any]) -> list[tuple[str, str]]:
    """Type and reason of the events."""
    return [(a.type, a.reason) for a in actions if isinstance(a, EmitEvent)]


async def test_a_new_service_gets_its_children_before_its_pods() -> None:
    """What a pod mounts exists before the Deployment makes one; the status says that nothing serves yet."""
    stage = Stage(autoscaling={"maxReplicas": 2})
    actions = await stage.reconcile()
    assert kinds(actions) == ["ConfigMap", "Service", "Deployment", "HorizontalPodAutoscaler"]
    assert stage.verdict() == ("False", "CreatingPods")
    assert stage.verdict("Progressing") == ("True", "CreatingPods")
    assert stage.verdict("ScalingReady") == ("Unknown", "WaitingForHPA")
    status = stage.service["status"]
    assert status["observedGeneration"] == 1
    assert status["selector"] == "paceline.dev/service=smollm2"
    assert status["url"] == "http://smollm2.default.svc:8000"
    assert (status["replicas"], status["readyReplicas"]) == (0, 0)


async def test_a_service_at_rest_is_left_alone() -> None:
    """No write of any kind, however often and however much later it is looked at."""
    stage = await serving(autoscaling={"maxReplicas": 2})
    stage.now += timedelta(days=1)
    assert await stage.reconcile() == []


async def test_readiness_follows_the_pods_and_is_announced_once() -> None:
    """Not before the pod's own Ready condition; one event for each transition."""
    stage = Stage()
    await stage.reconcile()
    stage.run_pods(make_pod(stage.deployment))
    loading = await stage.reconcile()
    assert stage.verdict() == ("False", "Loading")
    assert events(loading) == [("Normal", "Loading")]
    stage.run_pods(make_pod(stage.deployment, ready=True))
    ready = await stage.reconcile()
    assert stage.verdict() == ("True", "Serving")
    assert stage.verdict("Progressing") == ("False", "UpToDate")
    assert events(ready) == [("Normal", "Serving"), ("Normal", "UpToDate")]
    assert await stage.reconcile() == []


async def test_the_transition_time_moves_only_with_the_status() -> None:
    """A new reason or message does not make the condition young again."""
    stage = Stage()
    await stage.reconcile()
    before = stage.condition()["lastTransitionTime"]
    stage.now += timedelta(minutes=1)
    stage.run_pods(make_pod(stage.deployment))
    await stage.reconcile()
    assert stage.condition()["lastTransitionTime"] == before
    stage.run_pods(make_pod(stage.deployment, ready=True))
    await stage.reconcile()
    assert datetime.fromisoformat(stage.condition()["lastTransitionTime"]) == stage.now


async def test_a_failing_pod_is_shown_and_forgotten_when_corrected() -> None:
    """The server's reason while it fails; Loading and Serving for the corrected revision, old pod or not."""
    stage = Stage(model="hf://no/such")
    await stage.reconcile()
    gone = {"terminated": {"exitCode": 1, "message": "ModelNotFound: hf://no/such is not on the hub (404)"}}
    failing = make_pod(stage.deployment, lastState=gone, state={"waiting": {"reason": "CrashLoopBackOff"}})
    stage.run_pods(failing)
    actions = await stage.reconcile()
    assert stage.verdict() == ("False", "ModelNotFound")
    assert stage.verdict("Degraded") == ("True", "ModelNotFound")
    assert stage.verdict("Progressing") == ("False", "ModelNotFound")
    assert ("Warning", "ModelNotFound") in events(actions)
    stage.edit(model="hf://org/name")
    await stage.reconcile()
    stage.run_pods(failing, make_pod(stage.deployment, "pod-new"))
    await stage.reconcile()
    assert stage.verdict() == ("False", "Loading")
    stage.run_pods(make_pod(stage.deployment, "pod-new", ready=True))
    await stage.reconcile()
    assert (stage.verdict(), stage.verdict("Degraded")) == (("True", "Serving"), ("False", "AsExpected"))


async def test_a_bad_update_degrades_a_service_that_still_answers() -> None:
    """Ready says that requests are answered; Degraded and Progressing say what is wrong."""
    stage = await serving()
    old = stage.cluster.pods[KEY][0]
    stage.edit(image="registry.example/no-such:1")
    await stage.reconcile()
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}}
    stage.run_pods(old, make_pod(stage.deployment, "pod-new", state=waiting))
    await stage.reconcile()
    assert stage.verdict() == ("True", "ServingDegraded")
    assert "manifest unknown" in stage.condition()["message"]
    assert stage.verdict("Degraded") == ("True", "ImagePullBackOff")
    assert stage.verdict("Progressing") == ("False", "ImagePullBackOff")


async def test_an_update_is_progress_until_the_last_old_pod_is_gone() -> None:
    """Pods are told apart by the revision on them."""
    stage = await serving()
    old, before = stage.cluster.pods[KEY][0], stage.service["status"]["revision"]
    stage.edit(engine={"maxModelLen": 512})
    actions = await stage.reconcile()
    assert kinds(actions) == ["ConfigMap", "Deployment"]
    assert stage.service["status"]["revision"] != before
    assert stage.verdict("Progressing") == ("True", "RollingOut")
    stage.run_pods(old, make_pod(stage.deployment, "pod-new", ready=True))
    await stage.reconcile()
    assert stage.verdict("Progressing") == ("True", "RollingOut")
    stage.run_pods(make_pod(stage.deployment, "pod-new", ready=True))
    await stage.reconcile()
    assert stage.verdict("Progressing") == ("False", "UpToDate")


async def test_replicas_are_copied_to_the_deployment_and_roll_nothing() -> None:
    """Whoever wrote them on the LLMService: a user or the HPA through /scale."""
    stage = await serving(autoscaling={"maxReplicas": 4})
    template = stage.deployment["spec"]["template"]
    stage.edit(replicas=3)
    assert kinds(await stage.reconcile()) == ["Deployment"]
    assert stage.deployment["spec"]["replicas"] == 3
    assert stage.deployment["spec"]["template"] == template
    assert stage.verdict("Progressing") == ("True", "Scaling")
    assert stage.verdict() == ("True", "Serving")


async def test_zero_replicas_are_no_failure() -> None:
    """The reason says that nobody has to look for a fault."""
    stage = await serving()
    stage.edit(replicas=0)
    stage.run_pods()
    await stage.reconcile()
    assert stage.verdict() == ("False", "ScaledToZero")
    assert stage.verdict("Degraded") == ("False", "AsExpected")


async def test_switching_autoscaling_off_deletes_the_hpa() -> None:
    """And only that."""
    stage = await serving(autoscaling={"maxReplicas": 2})
    stage.edit(autoscaling=None)
    actions = await stage.reconcile()
    assert (kinds(actions), kinds(actions, Delete)) == ([], ["HorizontalPodAutoscaler"])
    assert stage.verdict("ScalingReady") == ("False", "AutoscalingOff")
    assert await stage.reconcile() == []


@pytest.mark.parametrize(
    ("able", "active", "verdict"),
    [
        (("True", "ReadyForNewScale"), ("True", "ValidMetricFound"), ("True", "ValidMetricFound")),
        (("True", "SucceededGetScale"), ("False", "FailedGetObjectMetric"), ("False", "FailedGetObjectMetric")),
        (("False", "FailedGetScale"), ("True", "ValidMetricFound"), ("False", "FailedGetScale")),
    ],
)
async def test_scaling_ready_says_what_the_hpa_says(
    able: tuple[str, str], active: tuple[str, str], verdict: tuple[str, str]
) -> None:
    """With the HPA's own reason."""
    stage = await serving(autoscaling={"maxReplicas": 2})
    reported = (("AbleToScale", *able), ("ScalingActive", *active), ("ScalingLimited", "True", "TooFewReplicas"))
    stage.cluster.child(KEY, "HorizontalPodAutoscaler")["status"] = {
        "conditions": [{"type": kind, "status": status, "reason": reason} for kind, status, reason in reported]
    }
    await stage.reconcile()
    assert stage.verdict("ScalingReady") == verdict


async def test_a_child_deleted_by_hand_comes_back() -> None:
    """The others are left alone."""
    stage = await serving()
    del stage.cluster.children[KEY, "Service"]
    assert kinds(await stage.reconcile()) == ["Service"]


async def test_a_child_changed_by_hand_is_set_back() -> None:
    """Fields of ours; a foreign annotation stays."""
    stage = await serving()
    stage.cluster.child(KEY, "Service")["spec"]["selector"] = {"app": "other"}
    assert kinds(await stage.reconcile()) == ["Service"]
    stage.cluster.child(KEY, "Service")["metadata"]["annotations"]["note"] = "theirs"
    assert await stage.reconcile() == []


@pytest.mark.parametrize(
    "owners", [[], [{"kind": "Other", "apiVersion": "v1", "name": "o", "uid": "x", "controller": True}]]
)
async def test_a_foreign_object_of_a_childs_name_is_neither_adopted_nor_overwritten(owners: list[Any]) -> None:
    """No half set of children is made; the condition says which object is in the way."""
    stage = Stage()
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "smollm2", "namespace": "default", "uid": "theirs", "ownerReferences": owners},
    }
    stage.cluster.children[KEY, "Service"] = foreign
    assert kinds(await stage.reconcile()) == []
    assert stage.verdict() == ("False", "NameConflict")
    assert "Service smollm2" in stage.condition()["message"]
    assert stage.cluster.child(KEY, "Service") == foreign
    del stage.cluster.children[KEY, "Service"]
    assert "Deployment" in kinds(await stage.reconcile())
    assert stage.verdict() == ("False", "CreatingPods")


async def test_a_recreated_service_waits_for_its_predecessors_children() -> None:
    """They are on their way out; adopting them would let the garbage collector take them under our feet."""
    stage = await serving()
    stage.service["metadata"]["uid"] = "another"
    assert kinds(await stage.reconcile()) == []
    assert stage.verdict("Degraded") == ("True", "WaitingForGarbageCollection")


@pytest.mark.parametrize("gone", [True, False])
async def test_nothing_is_made_for_a_service_that_goes(gone: bool) -> None:
    """Neither for one that is deleted nor for one that is being deleted."""
    stage = await serving()
    stage.cluster.children.clear()
    if gone:
        del stage.cluster.services[KEY]
    else:
        stage.service["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    assert await stage.reconcile() == []


async def test_an_invalid_specification_is_explained_and_what_runs_keeps_running() -> None:
    """All mistakes in the message; children stay as they are."""
    stage = await serving()
    stage.edit(engine={"maxModelLn": 5}, drainSeconds=-1)
    assert kinds(await stage.reconcile()) == []
    assert stage.verdict() == ("True", "ServingDegraded")
    message = stage.condition("Degraded")["message"]
    assert "spec.engine.maxModelLn: unknown field, did you mean maxModelLen?" in message
    assert "spec.drainSeconds" in message
    assert stage.service["status"]["observedGeneration"] == 2


async def test_a_refused_child_is_explained_and_tried_again() -> None:
    """The API server's words are in the condition, and a later pass finishes the work."""
    stage = Stage()
    stage.cluster.refusals["Deployment"] = 'unknown field "spec.template.spec.foo"'
    again = await reconcile(stage.cluster, KEY, IMAGE, lambda: NOW)
    assert again == reconcile_module.REFUSED_RETRY_SECONDS
    assert stage.verdict() == ("False", "ChildRefused")
    assert 'unknown field "spec.template.spec.foo"' in stage.condition()["message"]
    stage.cluster.refusals.clear()
    assert kinds(await stage.reconcile()) == ["Deployment"]
    assert stage.verdict() == ("False", "CreatingPods")


async def test_refused_pods_are_explained() -> None:
    """Quota and pod security are said by the Deployment, for there is no pod that could say it."""
    stage = Stage()
    await stage.reconcile()
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    stage.deployment["status"] = {"conditions": [refused]}
    await stage.reconcile()
    assert stage.verdict() == ("False", "PodsRefused")
    assert stage.condition()["message"] == "exceeded quota: gpus"


async def test_a_rollout_past_its_deadline_is_said_to_be_stuck() -> None:
    """The Deployment's verdict is passed on while the pods themselves have nothing to say."""
    stage = await serving()
    stage.edit(drainSeconds=5)
    await stage.reconcile()
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out"}
    stage.deployment["status"] = {"conditions": [late]}
    await stage.reconcile()
    assert stage.verdict("Progressing") == ("False", "ProgressDeadlineExceeded")


async def test_an_evicted_pod_is_news_only_until_its_successor_serves() -> None:
    """Its record stays for days."""
    stage = await serving()
    evicted = make_pod(stage.deployment, "pod-evicted")
    evicted["status"] = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
    stage.run_pods(evicted)
    await stage.reconcile()
    assert stage.verdict() == ("False", "Evicted")
    stage.run_pods(evicted, make_pod(stage.deployment, "pod-1", ready=True))
    await stage.reconcile()
    assert (stage.verdict(), stage.verdict("Degraded")) == (("True", "Serving"), ("False", "AsExpected"))


async def test_a_server_that_was_ready_and_is_not_is_not_called_loading() -> None:
    """Its engine restarts, or it drains: somebody may want to look."""
    stage = await serving()
    stage.run_pods(make_pod(stage.deployment, ready=False, started=True))
    actions = await stage.reconcile()
    assert stage.verdict() == ("False", "NotReady")
    assert ("Warning", "NotReady") in events(actions)


async def test_a_new_default_image_alone_rolls_no_pods() -> None:
    """An upgrade of the operator leaves running services on their image until something else rolls them."""
    stage = await serving()
    stage.image = NEW_IMAGE
    assert await stage.reconcile() == []
    stage.edit(replicas=2)
    await stage.reconcile()
    assert image_of(stage) == IMAGE
    stage.edit(drainSeconds=5)
    await stage.reconcile()
    assert image_of(stage) == NEW_IMAGE


async def test_an_image_of_the_users_own_is_used_and_left_behind_when_it_is_removed() -> None:
    """Without it the service goes to the operator's default, not to what it ran last."""
    stage = await serving(image="registry.example/own:3")
    assert image_of(stage) == "registry.example/own:3"
    stage.edit(image=None)
    await stage.reconcile()
    assert image_of(stage) == IMAGE


async def test_a_changed_image_on_the_deployment_is_set_back() -> None:
    """The image is remembered beside the template, so that an edit by hand does not become the truth."""
    stage = await serving()
    stage.image = NEW_IMAGE
    stage.deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "by-hand"
    await stage.reconcile()
    assert image_of(stage) == IMAGE


async def test_load_is_written_when_it_changes_and_taken_back_when_it_is_unknown() -> None:
    """A failed scrape is missing, never zero."""
    stage = await serving()
    stage.cluster.load = Load(queue_depth=3, ttft_p95=0.41234)
    (patch,) = await stage.reconcile()
    assert isinstance(patch, PatchStatus)
    assert (patch.status["queueDepth"], patch.status["ttftP95"]) == (3, 0.412)
    assert await stage.reconcile() == []
    stage.cluster.load = Load()
    await stage.reconcile()
    assert not {"queueDepth", "ttftP95"} & stage.service["status"].keys()


async def test_a_pod_that_waits_silently_is_looked_at_again() -> None:
    """The event that explains it changes none of the objects that are watched."""
    stage = Stage()
    await stage.reconcile()
    stage.run_pods(make_pod(stage.deployment, state={"waiting": {"reason": "ContainerCreating"}}))
    assert await reconcile(stage.cluster, KEY, IMAGE) == reconcile_module.SILENT_PODS_SECONDS
    stage.run_pods(make_pod(stage.deployment))
    assert await reconcile(stage.cluster, KEY, IMAGE) is None


async def test_a_child_that_was_swapped_meanwhile_is_left_alone() -> None:
    """The seam refuses, the caller looks again."""
    stage = await serving()
    plan = reconcile_module.decide(await stage.cluster.observe(KEY), IMAGE, NOW)
    assert plan.actions == ()
    stage.edit(replicas=2)
    plan = reconcile_module.decide(await stage.cluster.observe(KEY), IMAGE, NOW)
    stage.deployment["metadata"]["uid"] = "another"
    with pytest.raises(StaleObservation):
        await stage.cluster.execute(key_of(stage.service), plan)


def image_of(stage: Stage) -> str:
    """The server's image in the Deployment."""
    image: str = stage.deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    return image
