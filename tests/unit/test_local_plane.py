"""An LLMService runs without a cluster: the operator's reconciler decides, processes stand for pods."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from paceline_operator.cluster import EmitEvent, Manifest
from paceline_operator.local.backoff import BackOff
from paceline_operator.local.machine import Machine
from paceline_operator.local.placements import Placements
from paceline_operator.local.plane import Plane
from paceline_operator.local.runner import Node
from paceline_operator.local.testing import fake_service

MACHINE = Machine(cpus=4, memory=8 * 2**30)


class World:
    """A running plane, and what can be asked of it."""

    def __init__(self, plane: Plane, events: list[EmitEvent]) -> None:
        self.plane = plane
        self.events = events

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait for the store to satisfy a condition; returns what it found."""
        async with asyncio.timeout(60):
            version = -1
            while not (found := condition()):
                version = await self.plane.store.wait_for_change(version)
            return found

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Status, reason and message of a condition of the service."""
        service = self.plane.service or {}
        for condition in service.get("status", {}).get("conditions", ()):
            if condition["type"] == kind:
                return condition["status"], condition["reason"], condition["message"]
        return "Unknown", "", ""

    def is_ready(self) -> bool:
        return self.condition("Ready")[0] == "True"

    @property
    def pods(self) -> tuple[Manifest, ...]:
        return self.plane.store.list("Pod")

    def container(self) -> Manifest:
        """The status of the first pod's container; of one that has not run while there is none."""
        statuses = [status for pod in self.pods for status in pod["status"].get("containerStatuses", ())]
        return statuses[0] if statuses else {"restartCount": 0, "state": {}, "started": False}


Start = Callable[..., Awaitable[World]]


@asynccontextmanager
async def running(service: Manifest, folder: Path, machine: Machine) -> AsyncIterator[World]:
    events: list[EmitEvent] = []
    environment = {**os.environ, "PACELINE_MODEL_STORE": str(folder)}
    node = Node(machine, folder / "pods", folder / "gpus", folder / "models", environment, BackOff(base=0.05))
    plane = Plane(service, "image", node, events.append)
    task = asyncio.create_task(plane.run())
    try:
        yield World(plane, events)
    finally:
        plane.kill()
        plane.delete()
        await asyncio.wait_for(plane.emptied(), 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_service_becomes_ready_and_its_endpoint_is_its_ready_pod(tmp_path: Path) -> None:
    async with running(fake_service(), tmp_path, MACHINE) as world:
        assert world.plane.endpoints() == ()
        await world.until(world.is_ready)
        (address,) = world.plane.endpoints()
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{address.port}/readyz") as answer:
            assert answer.status == 200
        assert [event.reason for event in world.events][-1] in ("Serving", "UpToDate")


async def test_no_endpoint_exists_before_the_server_says_that_it_is_ready(tmp_path: Path) -> None:
    async with running(fake_service(environment={"FAKE_PHASE_SECONDS": "0.3"}), tmp_path, MACHINE) as world:
        await world.until(lambda: world.condition("Ready")[1] == "Loading")
        assert world.plane.endpoints() == ()
        await world.until(world.plane.endpoints)
        assert world.container()["started"]


async def test_a_killed_server_is_restarted_in_the_same_pod(tmp_path: Path) -> None:
    async with running(fake_service(), tmp_path, MACHINE) as world:
        await world.until(world.is_ready)
        (pod,) = world.pods
        (session_leader,) = world.plane.processes().values()
        for pid in _children(session_leader):
            os.kill(pid, signal.SIGKILL)
        await world.until(lambda: not world.is_ready())
        assert world.plane.endpoints() == ()
        await world.until(lambda: world.condition("Ready")[1] == "Killed")
        await world.until(world.is_ready)
        assert world.pods[0]["metadata"]["uid"] == pod["metadata"]["uid"]
        assert world.container()["restartCount"] == 1
        assert world.container()["lastState"]["terminated"]["exitCode"] == 137


async def test_a_server_that_cannot_start_backs_off_and_its_last_words_are_the_reason(tmp_path: Path) -> None:
    async with running(fake_service(model="hf://fake/missing"), tmp_path, MACHINE) as world:
        await world.until(lambda: world.container()["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff")
        status, reason, message = world.condition("Ready")
        assert (status, reason) == ("False", "ModelNotFound")
        assert "hf://fake/missing is neither in the model store nor on the hub" in message
        await world.until(lambda: world.container()["restartCount"] >= 3)


async def test_a_gpu_that_the_machine_does_not_have_leaves_the_pod_pending_and_says_what_to_do(tmp_path: Path) -> None:
    service = fake_service(resources={"limits": {"nvidia.com/gpu": "1"}})
    async with running(service, tmp_path, MACHINE) as world:
        await world.until(lambda: world.condition("Ready")[1] == "NoSpareGPU")
        assert "--cpu" in world.condition("Ready")[2]
        assert world.pods[0]["status"]["phase"] == "Pending"


async def test_a_gpu_that_another_process_holds_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_operator.local.runner._RETRY_SECONDS", 0.05)
    gpu = Machine(cpus=4, memory=8 * 2**30, gpus=("GPU-a",))
    other = Placements(gpu, tmp_path / "gpus")
    service = fake_service(resources={"limits": {"nvidia.com/gpu": "1"}})
    other.take({"metadata": {"name": "other"}, "spec": {"containers": [{"resources": service["spec"]["resources"]}]}})
    async with running(service, tmp_path, gpu) as world:
        await world.until(lambda: world.condition("Ready")[1] == "NoSpareGPU")
        assert "another `paceline up` holds GPU-a" in world.condition("Ready")[2]
        other.free("other")
        await world.until(world.is_ready)


async def test_a_server_that_stops_answering_its_liveness_probe_is_restarted(tmp_path: Path) -> None:
    service = fake_service()
    probe = {"periodSeconds": 0.05, "failureThreshold": 1, "timeoutSeconds": 1}
    service["spec"]["template"]["spec"]["containers"][0]["livenessProbe"] = probe
    async with running(service, tmp_path, MACHINE) as world:
        await world.until(world.is_ready)
        (address,) = world.plane.endpoints()
        async with aiohttp.ClientSession() as session:
            await session.post(f"http://127.0.0.1:{address.port}/fake/hang")
        await world.until(lambda: world.container()["restartCount"] == 1)
        await world.until(world.is_ready)


async def test_a_server_that_is_not_ready_within_its_startup_budget_is_restarted_and_not_before(tmp_path: Path) -> None:
    slow = {"FAKE_PHASE_SECONDS": "60"}
    async with running(fake_service(environment=slow, startupSeconds=20), tmp_path, MACHINE) as world:  # 20 probes
        await world.until(lambda: world.container()["restartCount"] == 1)
        event = next(one for one in world.plane.store.list("Event") if one["reason"] == "Unhealthy")
        assert event["message"].startswith("Startup probe failed: HTTP probe failed with statuscode: 503")


async def test_scaling_adds_a_pod_with_a_port_of_its_own_and_takes_one_away(tmp_path: Path) -> None:
    async with running(fake_service(), tmp_path, MACHINE) as world:
        await world.until(world.is_ready)
        world.plane.store.scale("LLMService", "fake", 2)
        await world.until(lambda: len(world.plane.endpoints()) == 2)
        assert len({address.port for address in world.plane.endpoints()}) == 2
        world.plane.store.scale("LLMService", "fake", 1)
        await world.until(lambda: len(world.pods) == 1)
        assert world.is_ready()


async def test_a_changed_template_rolls_the_pods_without_a_moment_without_an_endpoint(tmp_path: Path) -> None:
    async with running(fake_service(), tmp_path, MACHINE) as world:
        await world.until(world.is_ready)
        (old,) = world.pods
        service = world.plane.service
        assert service is not None
        changed = fake_service(engine={"maxBatchSize": 3})
        world.plane.store.apply(changed, service["metadata"]["uid"])

        def replaced() -> bool:
            assert world.plane.endpoints()
            return old["metadata"]["name"] not in {pod["metadata"]["name"] for pod in world.pods}

        await world.until(replaced)
        await world.until(lambda: world.condition("Progressing")[1] == "UpToDate")
        await world.until(lambda: len(world.plane.store.list("ConfigMap")) == 1)


async def test_an_old_pod_that_starts_again_in_a_rollout_reads_the_configuration_it_was_made_with(
    tmp_path: Path,
) -> None:
    async with running(fake_service(), tmp_path, MACHINE) as world:
        await world.until(world.is_ready)
        ((old, leader),) = world.plane.processes().items()
        service = world.plane.service
        assert service is not None
        changed = fake_service(environment={"FAKE_PHASE_SECONDS": "60"}, engine={"maxBatchSize": 3})
        world.plane.store.apply(changed, service["metadata"]["uid"])
        await world.until(lambda: len(world.plane.processes()) == 2)
        for pid in _children(leader):
            os.kill(pid, signal.SIGKILL)
        await world.until(lambda: world.container()["restartCount"] == 1 and world.plane.endpoints())
        read = _configurations(tmp_path / "pods")
        assert "max_batch_size" not in read.pop(old)
        assert "max_batch_size: 3" in read.popitem()[1]
        assert len(world.plane.store.list("ConfigMap")) == 2


async def test_a_running_stream_is_finished_before_the_process_ends(tmp_path: Path) -> None:
    async with running(fake_service(environment={"FAKE_TOKEN_SECONDS": "0.1"}), tmp_path, MACHINE) as world:
        await world.until(world.is_ready)
        (address,) = world.plane.endpoints()
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{address.port}/v1/chat/completions"
            async with session.post(url, json={"max_tokens": 6}) as answer:
                await answer.content.readline()
                world.plane.delete()
                assert world.plane.endpoints() == ()
                assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
        await world.plane.emptied()


async def test_a_drained_server_is_started_again_and_the_status_says_why(tmp_path: Path) -> None:
    async with running(fake_service(environment={"FAKE_PHASE_SECONDS": "0.2"}), tmp_path, MACHINE) as world:
        await world.until(world.is_ready)
        (address,) = world.plane.endpoints()
        async with aiohttp.ClientSession() as session:
            await session.post(f"http://127.0.0.1:{address.port}/drain")
        await world.until(lambda: world.condition("Ready")[1] == "Drained")
        assert world.condition("Degraded")[0] == "False"
        await world.until(world.is_ready)
        assert world.container()["restartCount"] == 1
        assert not [event for event in world.events if event.type == "Warning" and event.reason != "NotReady"]


async def test_a_missing_folder_is_told_by_name_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_operator.local.runner._RETRY_SECONDS", 0.05)
    folder = tmp_path / "weights"
    async with running(fake_service(model=f"file://{folder}"), tmp_path, MACHINE) as world:
        await world.until(lambda: world.condition("Ready")[1] == "FailedMount")
        assert str(folder) in world.condition("Ready")[2]
        folder.mkdir()
        await world.until(world.is_ready)


async def test_a_secret_is_taken_from_the_environment_and_its_absence_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    async with running(fake_service(modelSecretRef={"name": "hub"}), tmp_path, MACHINE) as world:
        await world.until(lambda: world.condition("Ready")[1] == "CreateContainerConfigError")
        assert "set HF_TOKEN" in world.condition("Ready")[2]
    monkeypatch.setenv("HF_TOKEN", "secret")
    async with running(fake_service(modelSecretRef={"name": "hub"}), tmp_path, MACHINE) as world:
        await world.until(world.is_ready)


def _configurations(folder: Path) -> dict[str, str]:
    """What each pod's server reads when it starts, by the pod's name."""
    return {path.parts[-4]: path.read_text() for path in folder.glob("*/volumes/config/engine.yaml")}


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
