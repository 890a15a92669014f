"""An operator that is killed between any two of its writes: the next one ends where this one would have."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
from reconciling import KEY, NEW_IMAGE, Killed, Mortal, Stage, serving

from paceline_operator.reconcile import reconcile
from paceline_operator.testing import NOW


def switch_autoscaling_off(stage: Stage) -> None:
    stage.edit(autoscaling=None)


def change_the_configuration(stage: Stage) -> None:
    stage.edit(engine={"maxModelLen": 512}, replicas=2)


def change_everything(stage: Stage) -> None:
    stage.edit(autoscaling=None, engine={"maxModelLen": 512}, drainSeconds=5)
    del stage.cluster.children[KEY, "Service", "smollm2"]
    stage.cluster.child(KEY, "PodDisruptionBudget")["spec"]["minAvailable"] = 7
    stage.image = NEW_IMAGE


def make_it_invalid(stage: Stage) -> None:
    stage.edit(model="ftp://x")


def lose_every_child(stage: Stage) -> None:
    stage.cluster.children.clear()


CHANGES = [switch_autoscaling_off, change_the_configuration, change_everything, make_it_invalid, lose_every_child]


async def rest(stage: Stage) -> dict[str, Any]:
    """Work until nothing is left to do; what there is then, but for uids, which tell how often something was made."""
    for _ in range(10):
        if not await stage.reconcile():
            children = copy.deepcopy(stage.cluster.children)
            for child in children.values():
                del child["metadata"]["uid"]
            return {"children": children, "status": stage.service["status"]}
    raise AssertionError("there is always something left to do")


async def die(stage: Stage, writes: int) -> int:
    """One pass of an operator that is killed after so many writes; how many of them it did not need."""
    cluster = Mortal(stage.cluster, writes)
    with contextlib.suppress(Killed):
        await reconcile(cluster, KEY, stage.image, lambda: NOW)
    return cluster.left


async def ends(begin: Callable[[], Any]) -> None:
    """For each n: whoever is killed after n writes is followed by one who ends where nobody was killed."""
    undisturbed = await rest(await begin())
    writes = 0
    while not await die(stage := await begin(), writes):
        assert await rest(stage) == undisturbed, f"killed after {writes} writes"
        writes += 1
    assert writes > 1


async def test_a_service_is_made_whole_whenever_its_operator_is_killed() -> None:
    async def begin() -> Stage:
        return Stage(autoscaling={"maxReplicas": 3})

    await ends(begin)


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_is_carried_out_whole_whenever_its_operator_is_killed(change: Callable[[Stage], None]) -> None:
    async def begin() -> Stage:
        stage = await serving(autoscaling={"maxReplicas": 3})
        change(stage)
        return stage

    await ends(begin)


async def test_a_refusal_is_told_whenever_its_operator_is_killed() -> None:
    async def begin() -> Stage:
        stage = Stage(autoscaling={"maxReplicas": 3})
        stage.cluster.refusals["PodDisruptionBudget"] = "exceeded quota"
        return stage

    await refused_ends(begin)


async def refused_ends(begin: Callable[[], Any]) -> None:
    undisturbed = await begin()
    await undisturbed.reconcile()
    writes = 0
    while not await die(stage := await begin(), writes):
        await stage.reconcile()
        assert stage.service["status"] == undisturbed.service["status"], f"killed after {writes} writes"
        writes += 1
    assert writes > 3
