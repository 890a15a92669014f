"""The control plane of local mode: the operator's reconciler and the controllers that a cluster has, over one store.

Each controller is a loop that looks at everything again at every change. `up` starts a plane with one LLMService.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import aiohttp

from paceline_operator import names
from paceline_operator.cluster import EmitEvent, Manifest
from paceline_operator.errors import StaleObservation
from paceline_operator.local import deployment, ports
from paceline_operator.local.cluster import LocalCluster, key_of
from paceline_operator.local.front import Address, endpoints
from paceline_operator.local.hpa import HpaController
from paceline_operator.local.kubelet import Kubelet
from paceline_operator.local.pod import port
from paceline_operator.local.room import room
from paceline_operator.local.runner import Node
from paceline_operator.local.store import Store
from paceline_operator.reconcile import reconcile
from paceline_operator.spec import parse_spec


class Plane:
    """One LLMService and everything that runs it.

    Args:
        service: the LLMService, as a user writes it.
        image: stands in the pods' image field; nothing is pulled.
        node: where pods run.
        on_event: told of every transition of the service.
    """

    def __init__(self, service: Manifest, image: str, node: Node, on_event: Callable[[EmitEvent], None]) -> None:
        self.store = Store(node.clock)
        self.key = key_of(service)
        self._image = image
        self._node = node
        self._on_event = on_event
        self._kubelet = Kubelet(self.store, node)
        self._most = room(parse_spec(service["spec"]), node.machine)
        self.store.apply(service)

    @property
    def service(self) -> Manifest | None:
        """The LLMService as it is now."""
        return self.store.get(names.KIND, self.key.name)

    def endpoints(self) -> tuple[Address, ...]:
        """Where the service's ready pods listen."""
        service = self.store.get("Service", names.child_name(self.key.name))
        return endpoints(service, self.store.list("Pod")) if service else ()

    def log(self, pod_name: str) -> Path:
        """The log file of a pod."""
        return self._kubelet.log(pod_name)

    def processes(self) -> dict[str, int]:
        """Pods that run, and the process that leads each one's session."""
        return self._kubelet.processes()

    async def run(self) -> None:
        """Run everything until cancelled."""
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            group.create_task(self._kubelet.run())
            group.create_task(self._control_deployment())
            hpa = HpaController(self.store, self.key, session, self._most)
            group.create_task(hpa.run())
            group.create_task(self._reconcile(LocalCluster(self.store, hpa.read_load, self._on_event)))

    def delete(self) -> None:
        """Delete the service: its pods end gracefully."""
        self.store.remove(names.KIND, self.key.name)

    def kill(self) -> None:
        """End all processes at once."""
        self._kubelet.kill()

    async def emptied(self) -> None:
        """Wait until no pod is left."""
        version = -1
        while True:
            version = await self.store.wait_for_change(version)
            if not self.store.list("Pod"):
                return

    async def _reconcile(self, cluster: LocalCluster) -> None:
        while True:
            seen = self.store.version
            try:
                again = await reconcile(cluster, self.key, self._image, self._node.clock)
            except StaleObservation:
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.store.wait_for_change(seen), again)

    async def _control_deployment(self) -> None:
        version = -1
        while True:
            version = await self.store.wait_for_change(version)
            for wanted in self.store.list("Deployment"):
                self._roll(wanted)

    def _roll(self, wanted: Manifest) -> None:
        selector = wanted["spec"]["selector"]["matchLabels"]
        changes = deployment.plan(wanted, self.store.list("Pod", selector))
        for name in changes.delete:
            self.store.mark_deleted("Pod", name)
        for _ in range(changes.create):
            taken = {port(pod, names.PORT_NAME) for pod in self.store.list("Pod")}
            self.store.apply(ports.with_port(deployment.make_pod(wanted), ports.free_port(taken)))
        status = deployment.status(wanted, self.store.list("Pod", selector))
        self.store.set_status("Deployment", wanted["metadata"]["name"], status)
