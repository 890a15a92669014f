"""Several `paceline up` on one machine do not take each other's GPUs."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from paceline_operator.local.machine import Machine, Placement, Unschedulable
from paceline_operator.local.placements import Placements

MACHINE = Machine(cpus=4, memory=8 * 2**30, gpus=("GPU-a", "MIG-GPU-b/1/0"))


def pod(name: str = "pod", **limits: Any) -> dict[str, Any]:
    """A pod with these limits."""
    return {"metadata": {"name": name}, "spec": {"containers": [{"resources": {"limits": limits}}]}}


def gpus_of(answer: Placement | Unschedulable) -> tuple[str, ...]:
    """The GPUs that the pod got."""
    assert isinstance(answer, Placement), answer
    return answer.gpus


ONE, BOTH = pod(**{"nvidia.com/gpu": 1}), pod(**{"nvidia.com/gpu": 2})


def test_a_gpu_is_used_by_one_process_and_given_back(tmp_path: Path) -> None:
    first, second, third = (Placements(MACHINE, tmp_path / "gpus") for _ in range(3))
    assert gpus_of(first.take(ONE)) == ("GPU-a",)
    assert gpus_of(second.take(ONE)) == ("MIG-GPU-b/1/0",)
    answer = third.take(ONE)
    assert isinstance(answer, Unschedulable)
    assert answer.message == (
        "another `paceline up` holds GPU-a, MIG-GPU-b/1/0 (0/1 nodes are available: 1 Insufficient nvidia.com/gpu.)"
    )
    first.free("pod")
    assert gpus_of(third.take(ONE)) == ("GPU-a",)


def test_a_pod_that_does_not_get_all_its_gpus_keeps_none(tmp_path: Path) -> None:
    first, second = (Placements(MACHINE, tmp_path) for _ in range(2))
    first.take(ONE)
    assert isinstance(second.take(BOTH), Unschedulable)
    first.free("pod")
    assert len(gpus_of(first.take(BOTH))) == 2


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    ours = Placements(MACHINE, tmp_path)
    context = multiprocessing.get_context("spawn")
    taken = context.Event()
    other = context.Process(target=_take_and_stay, args=(tmp_path, taken))
    other.start()
    assert taken.wait(60)
    assert isinstance(ours.take(BOTH), Unschedulable)
    other.kill()
    other.join()
    assert len(gpus_of(ours.take(BOTH))) == 2


def test_pods_on_the_cpu_claim_nothing(tmp_path: Path) -> None:
    placements = Placements(MACHINE, tmp_path / "gpus")
    assert gpus_of(placements.take(pod(cpu=1))) == ()
    assert not (tmp_path / "gpus").exists()
    placements.free("pod")
    placements.free("never placed")


def _take_and_stay(claims: Path, taken: Any) -> None:
    Placements(MACHINE, claims).take(BOTH)
    taken.set()
    multiprocessing.Event().wait()
