"""Each configuration has a ConfigMap of its own, which stays while a pod may mount it and goes when none can."""

from __future__ import annotations

from typing import Any

import pytest
from reconciling import KEY, Stage, kinds, serving

from paceline_operator.cluster import Apply, Delete, Manifest
from paceline_operator.testing import make_pod


def config_maps(stage: Stage) -> dict[str, Manifest]:
    """Those that are there, by name."""
    return {name: child for (_, kind, name), child in stage.cluster.children.items() if kind == "ConfigMap"}


def replica_set(deployment: Manifest, replicas: int) -> Manifest:
    """The ReplicaSet of the Deployment's template as it is now."""
    return {"kind": "ReplicaSet", "spec": {"replicas": replicas, "template": deployment["spec"]["template"]}}


async def changed_while_an_old_pod_runs() -> tuple[Stage, Manifest, str]:
    """A rollout that has begun, its old pod, and the name of the old pod's ConfigMap."""
    stage = await serving()
    (old,), (before,) = stage.cluster.pods[KEY], config_maps(stage)
    stage.edit(engine={"maxModelLen": 512})
    await stage.reconcile()
    return stage, old, before


async def test_an_old_pod_that_starts_again_in_a_rollout_finds_the_configuration_it_was_made_with() -> None:
    stage = await serving()
    ((name, before),) = config_maps(stage).items()
    stage.edit(engine={"maxModelLen": 512})
    actions = await stage.reconcile()
    assert (kinds(actions), kinds(actions, Delete)) == (["ConfigMap", "Deployment"], [])
    assert config_maps(stage)[name] == before
    assert len(config_maps(stage)) == 2


@pytest.mark.parametrize("terminating", [False, True])
async def test_the_old_configuration_goes_with_the_last_pod_that_mounts_it(terminating: bool) -> None:
    """A pod on its way out still has its container, which may start again."""
    stage, old, before = await changed_while_an_old_pod_runs()
    new = make_pod(stage.deployment, "pod-new", ready=True)
    if terminating:
        old["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    stage.run_pods(old, new)
    assert kinds(await stage.reconcile(), Delete) == []
    stage.run_pods(new)
    assert kinds(await stage.reconcile(), Delete) == ["ConfigMap"]
    assert before not in config_maps(stage)
    assert len(config_maps(stage)) == 1


async def test_the_configuration_of_a_lost_pod_stays_for_the_one_that_takes_its_place() -> None:
    """In a rollout that does not get on, the old ReplicaSet makes another pod of the old template."""
    stage = await serving()
    stage.cluster.replica_sets = [replica_set(stage.deployment, 1)]
    (before,) = config_maps(stage)
    stage.edit(engine={"maxModelLen": 512})
    stage.run_pods()
    assert kinds(await stage.reconcile(), Delete) == []
    assert before in config_maps(stage)
    stage.cluster.replica_sets = []
    assert kinds(await stage.reconcile(), Delete) == ["ConfigMap"]


async def test_the_record_of_an_evicted_pod_keeps_no_configuration() -> None:
    """It stays for days, and none of its containers is started again."""
    stage, old, before = await changed_while_an_old_pod_runs()
    old["status"] = {"phase": "Failed", "reason": "Evicted"}
    stage.run_pods(old, make_pod(stage.deployment, "pod-new", ready=True))
    await stage.reconcile()
    assert before not in config_maps(stage)


async def test_a_replica_set_that_is_only_history_keeps_no_configuration() -> None:
    stage, _, before = await changed_while_an_old_pod_runs()
    stage.cluster.replica_sets = [replica_set(stage.deployment, 0)]
    stage.run_pods(make_pod(stage.deployment, "pod-new", ready=True))
    await stage.reconcile()
    assert before not in config_maps(stage)


async def test_many_changes_that_never_get_ready_leave_no_more_than_are_mounted_and_one() -> None:
    stage, old, before = await changed_while_an_old_pod_runs()
    for length in range(600, 620):
        stage.edit(engine={"maxModelLen": length})
        await stage.reconcile()
        stage.run_pods(old, make_pod(stage.deployment, "pod-new"))
    await stage.reconcile()
    assert len(config_maps(stage)) == 2
    assert before in config_maps(stage)


async def test_a_way_back_takes_the_configuration_that_is_still_there() -> None:
    stage, old, before = await changed_while_an_old_pod_runs()
    stage.edit(engine=None)
    assert kinds(await stage.reconcile()) == ["Deployment"]
    stage.run_pods(old)
    await stage.reconcile()
    assert list(config_maps(stage)) == [before]


async def test_the_one_name_of_earlier_operators_goes_when_its_last_pod_has_gone() -> None:
    """What 0.1 made: pods that mount a ConfigMap of the service's own name."""
    stage = await serving()
    ((_, current),) = config_maps(stage).items()
    old_name = {**current, "metadata": {**current["metadata"], "name": "smollm2", "uid": "uid-of-old"}}
    stage.cluster.children[KEY, "ConfigMap", "smollm2"] = old_name
    new = make_pod(stage.deployment, "pod-new", ready=True)
    volumes = [{"name": "config", "configMap": {"name": "smollm2"}}]
    stage.run_pods(new, {**make_pod(stage.deployment, "pod-old", ready=True), "spec": {"volumes": volumes}})
    await stage.reconcile()
    assert "smollm2" in config_maps(stage)
    stage.run_pods(new)
    await stage.reconcile()
    assert list(config_maps(stage)) == [current["metadata"]["name"]]


async def test_a_config_map_that_only_carries_the_labels_is_left_alone() -> None:
    """Anybody can set a label."""
    stage = await serving()
    ((_, current),) = config_maps(stage).items()
    theirs = {**current, "metadata": {**current["metadata"], "name": "theirs", "ownerReferences": []}}
    stage.cluster.children[KEY, "ConfigMap", "theirs"] = theirs
    assert await stage.reconcile() == []


async def test_limits_of_tenants_are_written_where_the_running_pods_read_them() -> None:
    """No other ConfigMap and no other pods: servers follow their tenants while they run."""
    tenant: dict[str, Any] = {"name": "chat", "keysFrom": {"secretKeyRef": {"name": "keys", "key": "chat"}}}
    stage = await serving(tenants=[tenant])
    (before,) = config_maps(stage)
    stage.edit(tenants=[{**tenant, "requestsPerMinute": 5}])
    (apply, *_) = await stage.reconcile()
    assert isinstance(apply, Apply)
    assert apply.manifest["metadata"]["name"] == before
    assert "requests_per_minute: 5" in str(apply.manifest["data"])
    assert kinds([apply]) == ["ConfigMap"]
    assert stage.verdict("Progressing") == ("False", "UpToDate")
