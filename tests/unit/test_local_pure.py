"""Small rules of local mode, each as Kubernetes has it: placement, paths, probes, back-off, columns."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from paceline_operator.cluster import Manifest
from paceline_operator.local import columns, machine
from paceline_operator.local.backoff import BackOff
from paceline_operator.local.machine import Machine, Placement, Unschedulable, place
from paceline_operator.local.probes import Probe, Verdict
from paceline_operator.local.volumes import Mounts

ROOT = Path(__file__).resolve().parents[2]


def pod_with(**resources: Any) -> Manifest:
    return {"spec": {"containers": [{"name": "server", "resources": resources}]}}


MACHINE = Machine(cpus=4, memory=8 * 2**30, gpus=("GPU-a", "GPU-b"))


@pytest.mark.parametrize(
    ("files", "cpus", "memory"),
    [
        ({"cpu.max": "50000 100000", "memory.max": "1000000"}, Decimal("0.5"), 1_000_000),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        (
            {
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "1000000",
            },
            Decimal("0.5"),
            1_000_000,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "9223372036854771712"}, None, None),
        ({}, None, None),
    ],
    ids=["version 2", "version 2, unlimited", "version 1", "version 1, unlimited", "none"],
)
async def test_the_machine_is_what_the_container_may_use_of_it(
    files: dict[str, str], cpus: Decimal | None, memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    found = await machine.detect()
    assert found.cpus == (cpus or len(os.sched_getaffinity(0)))
    assert found.memory == (memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def test_every_pod_gets_gpus_of_its_own() -> None:
    one = place(pod_with(limits={"nvidia.com/gpu": "1"}), MACHINE, [])
    assert isinstance(one, Placement)
    two = place(pod_with(limits={"nvidia.com/gpu": "1"}), MACHINE, [one])
    assert isinstance(two, Placement)
    assert {*one.gpus, *two.gpus} == {"GPU-a", "GPU-b"}
    three = place(pod_with(limits={"nvidia.com/gpu": "1"}), MACHINE, [one, two])
    assert three == Unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")


def test_without_any_gpu_the_way_out_is_said_before_the_scheduler_s_words() -> None:
    answer = place(pod_with(limits={"nvidia.com/gpu": "1"}), Machine(cpus=4, memory=8 * 2**30), [])
    assert isinstance(answer, Unschedulable)
    assert answer.message.startswith("`paceline up --cpu` ")
    assert answer.message.endswith("(0/1 nodes are available: 1 Insufficient nvidia.com/gpu.)")


@pytest.mark.parametrize(
    ("resources", "word"),
    [
        ({"requests": {"cpu": "5"}}, "cpu"),
        ({"limits": {"memory": "9Gi"}}, "memory"),  # a limit without a request is one
        ({"limits": {"amd.com/gpu": 1}}, "amd.com/gpu"),
        ({"limits": {"nvidia.com/mig-1g.10gb": 1}}, "nvidia.com/mig-1g.10gb"),
    ],
)
def test_a_pod_that_does_not_fit_is_told_for_want_of_what(resources: dict[str, Any], word: str) -> None:
    answer = place(pod_with(**resources), MACHINE, [])
    assert isinstance(answer, Unschedulable)
    assert f"Insufficient {word}" in answer.message


def test_requests_of_all_pods_together_must_fit() -> None:
    held = [Placement(Decimal(3), Decimal(0), ())]
    assert isinstance(place(pod_with(requests={"cpu": "1"}), MACHINE, held), Placement)
    assert isinstance(place(pod_with(requests={"cpu": "1001m"}), MACHINE, held), Unschedulable)


@pytest.mark.parametrize(
    ("text", "translated"),
    [
        ("/etc/paceline/engine.yaml", "/state/config/engine.yaml"),
        ("/etc/paceline", "/state/config"),
        ("/etc/paceline-other/x", "/etc/paceline-other/x"),
        ("/etc/paceline/deep/x", "/state/deep/x"),  # the longest mount path wins
        ("file:///models/a", "file:///state/models/a"),
        ("--config", "--config"),
    ],
)
def test_paths_of_the_container_become_paths_of_the_machine(text: str, translated: str) -> None:
    folders = {
        "/etc/paceline": Path("/state/config"),
        "/etc/paceline/deep": Path("/state/deep"),
        "/models": Path("/state/models"),
    }
    assert Mounts(folders).translate(text) == translated


def test_a_probe_changes_its_mind_after_as_many_equal_answers_as_its_threshold() -> None:
    probe = Probe("http://x", success_threshold=1, failure_threshold=3)
    verdict = Verdict()
    seen = []
    for failure in ("no", None, "no", "no", None, "no", "no", "no", None):
        verdict = verdict.after(failure, probe)
        seen.append(verdict.passing)
    assert seen == [None, True, True, True, True, True, True, False, True]


def test_restarts_back_off_from_at_once_to_the_cap_and_start_over_after_a_long_run() -> None:
    back_off, waits, wait = BackOff(base=1, cap=60), [], None
    for ran in (0.5,) * 9:
        wait = back_off.next(wait, ran)
        waits.append(wait)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert back_off.next(60, ran=120) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (119, "119s"), (120, "2m"), (130, "2m10s"), (599, "9m59s"), (3600, "60m"), (3 * 3600, "3h"),
        (5 * 3600 + 60, "5h1m"), (8 * 3600, "8h"), (47 * 3600, "47h"), (2 * 86400, "2d"), (2 * 86400 + 3600, "2d1h"),
        (8 * 86400, "8d"), (729 * 86400, "729d"), (730 * 86400, "2y"), (731 * 86400, "2y1d"), (8 * 365 * 86400, "8y"),
    ],
)  # fmt: skip
def test_ages_are_written_as_kubectl_writes_them(seconds: int, text: str) -> None:
    assert columns.age(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(("status", "shown"), [({}, "0/3"), ({"readyReplicas": 1, "replicas": 3}, "1/3")])
def test_the_table_says_how_many_replicas_are_ready_of_those_that_are_wanted(
    status: dict[str, Any], shown: str
) -> None:
    service = {"metadata": {"name": "x"}, "spec": {"model": "hf://a/b", "replicas": 3}, "status": status}
    heading, row = columns.table([service], datetime.now(UTC)).splitlines()
    assert row[heading.index("REPLICAS") :].split()[0] == shown


def test_the_packaged_crd_is_the_repository_s() -> None:
    packaged = (ROOT / "operator/paceline_operator/crd.yaml").read_text()
    assert packaged.endswith((ROOT / "crds/llmservices.paceline.dev.yaml").read_text())
