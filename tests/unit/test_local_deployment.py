"""The rolling update of local mode keeps Kubernetes' promises: never too many pods, never too few that serve."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_operator.cluster import Manifest
from paceline_operator.local import deployment as d


def make_deployment(replicas: int, strategy: Manifest | None = None, image: str = "new") -> Manifest:
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "server", "image": image}]}}
    return {
        "kind": "Deployment",
        "metadata": {"name": "x", "namespace": "default", "uid": "u", "generation": 1},
        "spec": {"replicas": replicas, "template": template, "strategy": strategy or {}},
    }


def make_pod(name: str, of: Manifest, *, ready: bool = True, **metadata: Any) -> Manifest:
    pod = d.make_pod(of)
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {**pod, "metadata": {**pod["metadata"], "name": name, **metadata}, "status": {"conditions": [condition]}}


def rolling(surge: int | str, unavailable: int | str) -> Manifest:
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}


def test_missing_pods_are_created_and_surplus_ones_deleted_unready_first() -> None:
    wanted = make_deployment(2)
    assert d.plan(wanted, []) == d.Changes(create=2)
    pods = [make_pod("a", wanted), make_pod("b", wanted, ready=False), make_pod("c", wanted)]
    assert d.plan(wanted, pods) == d.Changes(delete=("b",))


def test_the_pod_with_the_lower_deletion_cost_goes_first_and_the_younger_one_of_equals() -> None:
    wanted = make_deployment(1)
    busy = make_pod("busy", wanted, annotations={d.DELETION_COST: "5"})
    assert d.plan(wanted, [make_pod("idle", wanted), busy]).delete == ("idle",)
    assert d.plan(wanted, [make_pod("old", wanted), make_pod("young", wanted)]).delete == ("young",)


def test_with_a_surge_the_old_pod_stays_until_the_new_one_serves() -> None:
    old, new = make_deployment(1, image="old"), make_deployment(1, rolling(1, 0))
    serving = make_pod("old", old)
    assert d.plan(new, [serving]) == d.Changes(create=1)
    assert d.plan(new, [serving, make_pod("new", new, ready=False)]) == d.Changes()
    assert d.plan(new, [serving, make_pod("new", new)]) == d.Changes(delete=("old",))


def test_in_place_the_old_pod_goes_first_and_the_new_one_is_made_while_it_ends() -> None:
    old, new = make_deployment(1, image="old"), make_deployment(1, rolling(0, 1))
    assert d.plan(new, [make_pod("old", old)]) == d.Changes(delete=("old",))
    assert d.plan(new, [make_pod("old", old, deletionTimestamp="now")]) == d.Changes(create=1)


def test_recreate_makes_no_new_pod_before_the_last_old_one_has_ended() -> None:
    old, new = make_deployment(2, image="old"), make_deployment(2, {"type": "Recreate"})
    assert d.plan(new, [make_pod("a", old), make_pod("b", old)]) == d.Changes(delete=("a", "b"))
    assert d.plan(new, [make_pod("a", old, deletionTimestamp="now")]) == d.Changes()
    assert d.plan(new, []) == d.Changes(create=2)


def test_scaling_to_zero_deletes_pods_of_every_template() -> None:
    old, new = make_deployment(0, image="old"), make_deployment(0)
    assert set(d.plan(new, [make_pod("a", old), make_pod("b", old, ready=False)]).delete) == {"a", "b"}
    assert d.plan(new, [make_pod("c", new)]).delete == ("c",)


@pytest.mark.parametrize(("surge", "unavailable"), [("25%", "25%"), ("0%", "0%")])
def test_percentages_never_stand_still(surge: str, unavailable: str) -> None:
    old, new = make_deployment(1, image="old"), make_deployment(1, rolling(surge, unavailable))
    assert d.plan(new, [make_pod("old", old)]) != d.Changes()


@given(
    replicas=st.integers(0, 5),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 3),
    old_ready=st.lists(st.booleans(), max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=60, max_size=60),
)
def test_a_rollout_ends_and_keeps_within_its_limits_whatever_becomes_ready_when(
    replicas: int, surge: int, unavailable: int, old_ready: list[bool], steps: list[tuple[int, bool]]
) -> None:
    old, new = make_deployment(replicas, image="old"), make_deployment(replicas, rolling(surge, unavailable))
    pods = [make_pod(f"old{i}", old, ready=ready) for i, ready in enumerate(old_ready)]
    for index, becomes_ready in [*steps, *((i, True) for i in range(60))]:
        changes = d.plan(new, pods)
        serving_before = sum(pod["status"]["conditions"][0]["status"] == "True" for pod in pods)
        pods = [pod for pod in pods if pod["metadata"]["name"] not in changes.delete]
        pods += [make_pod(f"new{index}-{n}-{len(pods)}", new, ready=False) for n in range(changes.create)]
        serving = sum(pod["status"]["conditions"][0]["status"] == "True" for pod in pods)
        lowest = replicas - (unavailable if surge or unavailable else 1)
        assert serving >= min(serving_before, lowest)
        if changes.create:
            assert len(pods) <= replicas + surge
        unready = [pod for pod in pods if pod["status"]["conditions"][0]["status"] != "True"]
        if becomes_ready and unready:
            unready[index % len(unready)]["status"]["conditions"][0]["status"] = "True"
    assert len(pods) == replicas
    assert all(pod["metadata"]["labels"][d.TEMPLATE_HASH] == d.template_hash(new) for pod in pods)


def test_status_counts_updated_and_ready_pods_without_those_that_end() -> None:
    old, new = make_deployment(2, image="old"), make_deployment(2)
    pods = [make_pod("a", new), make_pod("b", old), make_pod("c", old, deletionTimestamp="now")]
    status = d.status(new, pods)
    assert (status["replicas"], status["updatedReplicas"], status["readyReplicas"]) == (2, 1, 2)
