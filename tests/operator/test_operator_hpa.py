"""Operator, Deployment controller and a real HPA at once: a roll while the load grows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import Adapter, Server
from operators import OperatorProcess, World, eventually

from paceline_operator import names

AUTOSCALING = {
    "maxReplicas": 3,
    "targetQueueDepth": 4,
    "ttftObjectiveSeconds": 10,
    "scaleDownStabilizationSeconds": 3600,
}
SURGE = 1  # of a service on the CPU


class Kubelet:
    """Makes every pod of a namespace ready, one at each look, and answers for it at an address of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers = itertools.count(1)
        self.servers: dict[str, Server] = {}  # by the pod's name
        self.running = 0  # requests, of each server

    def look(self) -> list[dict[str, Any]]:
        """The pods that are there; one that is not ready is made so."""
        pods = self._world.list("pods")
        for gone in self.servers.keys() - {pod["metadata"]["name"] for pod in pods}:
            self.servers.pop(gone).close()
        for pod in pods:
            if pod["metadata"]["name"] not in self.servers:
                self._start(pod)
                break
        for server in self.servers.values():
            server.running = self.running
        return pods

    def _start(self, pod: dict[str, Any]) -> None:
        process = os.getpid()  # all pods have the same port, and another test run may have pods too
        address = f"127.{64 + process % 128}.{process // 128 % 256}.{next(self._numbers)}"
        self.servers[pod["metadata"]["name"]] = Server(address, names.PORT)
        self._world.report(pod, ready=True, address=address)

    def close(self) -> None:
        """Stop answering."""
        for server in self.servers.values():
            server.close()


@pytest.fixture
def scaled(adapter: Adapter, tmp_path: Path) -> Iterator[World]:
    """A namespace with an operator of its own, on the API server that has the adapter."""
    with adapter.server.namespace() as namespace:
        operator = OperatorProcess(
            tmp_path / "operator.log",
            kubeconfig=str(adapter.server.kubeconfig),
            namespaces=[namespace],
            lease_namespace=namespace,
        )
        yield World(adapter.server.kubectl, namespace)
        operator.stop()


@pytest.fixture
def kubelet(scaled: World) -> Iterator[Kubelet]:
    """Of the namespace."""
    kubelet = Kubelet(scaled)
    yield kubelet
    kubelet.close()


def test_a_roll_and_the_hpa_do_not_fight_over_replicas(scaled: World, kubelet: Kubelet) -> None:
    """The load grows in the middle of a roll: replicas go up once, and never are there more pods than may be."""
    scaled.apply(autoscaling=AUTOSCALING)
    eventually(lambda: kubelet.look() and scaled.verdict() == ("True", "Serving"))
    eventually(lambda: kubelet.look() and scaled.verdict("ScalingReady")[0] == "True", seconds=180)
    first = revision(scaled)
    kubelet.running = 6
    scaled.apply(autoscaling=AUTOSCALING, drainSeconds=30)
    wanted, too_many = [1], []

    def rolled_and_scaled() -> bool:
        pods = kubelet.look()  # before the replicas, which only grow: a pod that is too many is not excused by them
        service = scaled.get("llm")
        if service["spec"]["replicas"] != wanted[-1]:
            wanted.append(service["spec"]["replicas"])
        if len([pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]) > wanted[-1] + SURGE:
            too_many.append((wanted[-1], pods))
        ready = service["status"]["readyReplicas"] == wanted[-1] == AUTOSCALING["maxReplicas"]
        return ready and scaled.verdict("Progressing") == ("False", "UpToDate")

    eventually(rolled_and_scaled, seconds=180)
    assert revision(scaled) != first
    assert wanted == sorted(wanted)
    assert not too_many
    deployment = scaled.get("deployment")
    assert deployment["spec"]["replicas"] == AUTOSCALING["maxReplicas"]
    changes = 1 + len(wanted[1:])  # the roll, and each step of the HPA
    assert deployment["metadata"]["generation"] <= 1 + changes


def revision(world: World) -> str:
    """Of the pods that should run."""
    labels: dict[str, str] = world.get("deployment")["spec"]["template"]["metadata"]["labels"]
    return labels[names.LABEL_REVISION]
