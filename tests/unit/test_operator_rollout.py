"""What rolls the pods of one service and what does not, on a cluster in dictionaries."""

from __future__ import annotations

from datetime import timedelta

from reconciling import IMAGE, KEY, NEW_IMAGE, Stage, events, image_of, kinds, serving

from paceline_operator.cluster import Manifest
from paceline_operator.reconcile import LEAVING_PODS_SECONDS, reconcile
from paceline_operator.testing import make_pod


def waiting_for_a_gpu(stage: Stage) -> Manifest:
    """A new pod for which no node has a free GPU."""
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return make_pod(stage.deployment, "pod-new") | {"status": {"phase": "Pending", "conditions": [waiting]}}


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


async def test_a_rollout_in_place_does_not_fail_while_the_old_pod_drains_and_holds_the_gpu() -> None:
    """The new pod finds none until then, which is how a rollout in place goes. Without anybody to wait for it fails."""
    stage = await serving(resources={"limits": {"nvidia.com/gpu": "1"}})
    (old,) = stage.cluster.pods[KEY]
    stage.edit(drainSeconds=5)
    await stage.reconcile()
    old["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    new = waiting_for_a_gpu(stage)
    stage.run_pods(old, new)
    actions = await stage.reconcile()
    assert stage.verdict() == ("False", "Starting")
    assert stage.verdict("Progressing") == ("True", "Starting")
    assert stage.verdict("Degraded") == ("False", "AsExpected")
    assert ("Warning", "NoSpareGPU") not in events(actions)
    stage.run_pods(new)
    await stage.reconcile()
    assert stage.verdict("Progressing") == ("False", "NoSpareGPU")


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


async def test_a_pod_that_does_not_leave_in_time_is_not_waited_for() -> None:
    """Of a lost node nobody says that its pod has gone: without a spare GPU its successor waits for ever."""
    stage = await serving(resources={"limits": {"nvidia.com/gpu": "1"}})
    (lost,) = stage.cluster.pods[KEY]
    lost["metadata"]["deletionTimestamp"] = "2026-01-02T03:05:20Z"
    stage.run_pods(lost, waiting_for_a_gpu(stage))
    assert await reconcile(stage.cluster, KEY, IMAGE, lambda: stage.now) == LEAVING_PODS_SECONDS
    assert stage.verdict() == ("False", "Starting")
    stage.now += timedelta(minutes=2)
    await stage.reconcile()
    assert stage.verdict() == ("False", "NoSpareGPU")


async def test_a_pod_whose_containers_have_ended_holds_no_gpu_any_more() -> None:
    """Somebody's finalizer may keep its record: the scheduler has given its place away."""
    stage = await serving(resources={"limits": {"nvidia.com/gpu": "1"}})
    (ended,) = stage.cluster.pods[KEY]
    ended["metadata"]["deletionTimestamp"] = "2026-01-02T03:05:20Z"
    ended["status"]["phase"] = "Succeeded"
    stage.run_pods(ended, waiting_for_a_gpu(stage))
    await stage.reconcile()
    assert stage.verdict() == ("False", "NoSpareGPU")


async def test_a_rollout_past_its_deadline_is_said_to_be_stuck() -> None:
    """The Deployment's verdict is passed on while the pods themselves have nothing to say."""
    stage = await serving()
    stage.edit(drainSeconds=5)
    await stage.reconcile()
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out"}
    stage.deployment["status"] = {"conditions": [late]}
    await stage.reconcile()
    assert stage.verdict("Progressing") == ("False", "ProgressDeadlineExceeded")


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
