"""How far autoscaling goes on one machine: as far as each replica has cores, memory and devices of its own."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_operator.desired import render
from paceline_operator.local.machine import Machine
from paceline_operator.local.room import Room, bounded, note, room
from paceline_operator.spec import parse_service, parse_spec

MACHINE = Machine(cpus=4, memory=8 * 2**30, gpus=("GPU-a", "GPU-b", "GPU-c"))


def service(**spec: Any) -> dict[str, Any]:
    metadata = {"namespace": "default", "name": "x", "uid": "1"}
    return {"metadata": metadata, "spec": {"model": "hf://a/b", "resources": {}, **spec}}


@pytest.mark.parametrize(
    ("spec", "replicas", "word"),
    [
        ({}, 1, "computes with 4 of this machine's 4 cores"),
        ({"engine": {"threads": 2}}, 2, "computes with 2 of"),
        ({"engine": {"threads": 64}}, 1, "computes with 4 of"),
        ({"resources": {"requests": {"cpu": "1500m"}}}, 2, "requests 1.5 of this machine's 4 cores"),
        ({"resources": {"requests": {"cpu": "8"}}}, 1, "requests 8 of"),
        ({"resources": {"requests": {"cpu": "1", "memory": "3Gi"}}}, 2, "memory"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, 3, "holds 1 of this machine's GPUs"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "2"}}}, 2, "cores"),
    ],
)
def test_there_is_room_for_as_many_as_have_something_of_their_own_and_for_one(
    spec: dict[str, Any], replicas: int, word: str
) -> None:
    found = room(parse_spec(service(**spec)["spec"]), MACHINE)
    assert found is not None
    assert found.replicas == replicas
    assert word in found.reason


@pytest.mark.parametrize(("most", "replicas"), [(None, 8), (Room(9, ""), 8), (Room(5, ""), 5), (Room(1, ""), 2)])
def test_an_hpa_goes_as_far_as_there_is_room_and_never_below_what_the_user_wants_at_least(
    most: Room | None, replicas: int
) -> None:
    wanted = service(autoscaling={"minReplicas": 2, "maxReplicas": 8})
    (hpa,) = (one for one in render(parse_service(wanted), "i").children if one["kind"] == "HorizontalPodAutoscaler")
    assert bounded(hpa, most)["spec"]["maxReplicas"] == replicas


def test_a_user_is_told_only_where_the_machine_bounds_what_was_asked_for() -> None:
    assert note(service(), MACHINE) is None
    assert note(service(autoscaling={"maxReplicas": 1}), MACHINE) is None
    assert note(service(autoscaling={"minReplicas": 3, "maxReplicas": 3}), MACHINE) is None
    said = note(service(autoscaling={"maxReplicas": 3}), MACHINE)
    assert said is not None
    assert said.startswith("spec.autoscaling.maxReplicas: 1 on this machine: each computes with 4 of this machine's 4")
