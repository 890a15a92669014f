"""Several `paceline up` on one machine do not take each other's GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
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


TAKE_AND_STAY = """
import json, pathlib, sys, time
from paceline_operator.local.machine import Machine
from paceline_operator.local.placements import Placements
folder, pod, *gpus = sys.argv[1:]
placements = Placements(Machine(cpus=4, memory=8 * 2**30, gpus=tuple(gpus)), pathlib.Path(folder))
placements.take(json.loads(pod))
print("taken", flush=True)
time.sleep(600)
"""
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
    program = [sys.executable, "-c", TAKE_AND_STAY, str(tmp_path), json.dumps(BOTH), *MACHINE.gpus]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "taken\n"
            assert isinstance(ours.take(BOTH), Unschedulable)
        finally:
            other.kill()
    assert len(gpus_of(ours.take(BOTH))) == 2


def test_pods_on_the_cpu_claim_nothing(tmp_path: Path) -> None:
    placements = Placements(MACHINE, tmp_path / "gpus")
    assert gpus_of(placements.take(pod(cpu=1))) == ()
    assert not (tmp_path / "gpus").exists()
    placements.free("pod")
    placements.free("never placed")
