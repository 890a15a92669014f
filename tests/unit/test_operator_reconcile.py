"""What is made, set back and taken away for one service, on a cluster in dictionaries."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from reconciling import IMAGE, KEY, Stage, kinds, serving

from paceline_operator import reconcile as reconcile_module
from paceline_operator.cluster import Delete, Observed, Plan
from paceline_operator.errors import ChildRefused, StaleObservation
from paceline_operator.reconcile import reconcile
from paceline_operator.testing import NOW, key_of


async def test_a_new_service_gets_its_children_before_its_pods() -> None:
    """What a pod mounts exists before the Deployment makes one; the status says that nothing serves yet."""
    stage = Stage(autoscaling={"maxReplicas": 2})
    actions = await stage.reconcile()
    assert kinds(actions) == ["ConfigMap", "Service", "Deployment", "PodDisruptionBudget", "HorizontalPodAutoscaler"]
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


async def test_switching_autoscaling_off_deletes_the_hpa() -> None:
    """And only that."""
    stage = await serving(autoscaling={"maxReplicas": 2})
    stage.edit(autoscaling=None)
    actions = await stage.reconcile()
    assert (kinds(actions), kinds(actions, Delete)) == ([], ["HorizontalPodAutoscaler"])
    assert stage.verdict("ScalingReady") == ("False", "AutoscalingOff")
    assert await stage.reconcile() == []


async def test_a_child_deleted_by_hand_comes_back() -> None:
    """The others are left alone."""
    stage = await serving()
    del stage.cluster.children[KEY, "Service", "smollm2"]
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
    stage.cluster.children[KEY, "Service", "smollm2"] = foreign
    assert kinds(await stage.reconcile()) == []
    assert stage.verdict() == ("False", "NameConflict")
    assert "Service smollm2" in stage.condition()["message"]
    assert stage.cluster.child(KEY, "Service") == foreign
    del stage.cluster.children[KEY, "Service", "smollm2"]
    assert "Deployment" in kinds(await stage.reconcile())
    assert stage.verdict() == ("False", "CreatingPods")


async def test_a_service_whose_name_another_one_took_does_not_count_the_others_pods() -> None:
    """`a.b` has a child name that a user may write as a name too: the later of the two said that it served."""
    first = await serving()
    stage = Stage()
    stage.service["metadata"]["uid"] = "the-later-one"
    stage.cluster.children, stage.cluster.pods = first.cluster.children, first.cluster.pods
    for child in stage.cluster.children.values():
        child["metadata"]["ownerReferences"][0]["name"] = "the.earlier.one"
    await stage.reconcile()
    assert stage.verdict() == ("False", "NameConflict")
    assert stage.service["status"]["readyReplicas"] == 0


async def test_a_name_that_somebody_else_has_is_looked_at_again_before_the_full_list() -> None:
    """Nobody tells the operator when an object that is not its own goes."""
    stage = Stage()
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "smollm2", "namespace": "default", "uid": "x"},
    }
    stage.cluster.children[KEY, "Service", "smollm2"] = foreign
    again = await reconcile(stage.cluster, KEY, IMAGE, lambda: NOW)
    assert again == reconcile_module.REFUSED_RETRY_SECONDS
    del stage.cluster.children[KEY, "Service", "smollm2"]
    assert await reconcile(stage.cluster, KEY, IMAGE, lambda: NOW) is None


async def test_a_recreated_service_waits_for_its_predecessors_children() -> None:
    """They are on their way out; adopting them would let the garbage collector take them under our feet."""
    stage = await serving()
    stage.service["metadata"]["uid"] = "another"
    assert kinds(await stage.reconcile()) == []
    assert stage.verdict("Degraded") == ("True", "WaitingForGarbageCollection")


async def test_a_child_that_was_deleted_and_cannot_go_is_told_with_what_holds_it() -> None:
    """It cannot be made again before, and without it no pods are being created, which is what was said."""
    stage = await serving()
    stage.run_pods()
    stage.deployment["metadata"] |= {"deletionTimestamp": "2026-01-02T03:04:05Z", "finalizers": ["backup.example/hold"]}
    assert kinds(await stage.reconcile()) == []
    assert stage.verdict() == ("False", "WaitingForGarbageCollection")
    assert "Deployment smollm2 was deleted" in stage.condition()["message"]
    assert "backup.example/hold" in stage.condition()["message"]


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


async def test_a_refused_child_is_explained_and_tried_again() -> None:
    """The API server's words are in the condition, and a later pass finishes the work."""
    stage = Stage()
    stage.cluster.refusals["Deployment"] = 'unknown field "spec.template.spec.foo"'
    again = await reconcile(stage.cluster, KEY, IMAGE, lambda: NOW)
    assert again == reconcile_module.REFUSED_RETRY_SECONDS
    assert stage.verdict() == ("False", "ChildRefused")
    assert 'unknown field "spec.template.spec.foo"' in stage.condition()["message"]
    stage.cluster.refusals.clear()
    assert kinds(await stage.reconcile()) == ["Deployment", "PodDisruptionBudget"]
    assert stage.verdict() == ("False", "CreatingPods")


async def test_when_a_late_child_is_refused_the_status_tells_of_what_was_applied_before_it() -> None:
    """The Deployment has been applied by then: its new pods are the ones that count."""
    stage = await serving()
    before = stage.service["status"]["revision"]
    stage.edit(engine={"maxModelLen": 512}, replicas=2)
    del stage.cluster.children[KEY, "PodDisruptionBudget", "smollm2"]
    stage.cluster.refusals["PodDisruptionBudget"] = "forbidden"
    await stage.reconcile()
    revision = stage.deployment["spec"]["template"]["metadata"]["labels"]["paceline.dev/revision"]
    assert revision != before
    assert stage.service["status"]["revision"] == revision
    assert stage.verdict("Degraded") == ("True", "ChildRefused")


async def test_a_service_that_went_while_a_child_was_refused_needs_no_explanation() -> None:
    refusal = ChildRefused("Deployment", "smollm2", "forbidden")
    assert reconcile_module.explain(Observed(None), NOW, refusal) == Plan()


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
