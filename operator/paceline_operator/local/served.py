"""A service that this process has up: the plane, its front door, and the snapshot of both on the disk. Used by `up`."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from paceline_operator.cluster import EmitEvent, Manifest
from paceline_operator.conditions import Condition, ConditionType, Truth, settle
from paceline_operator.local import machine
from paceline_operator.local.front import DRAINING, FrontDoor, Refusal
from paceline_operator.local.manifest import IMAGE
from paceline_operator.local.occupied import refusal
from paceline_operator.local.plane import Plane
from paceline_operator.local.runner import Node
from paceline_operator.local.startup import StartupWatch
from paceline_operator.local.state import Snapshot, StateFolder
from paceline_operator.pods import condition_of

_PUBLISH_SECONDS = 0.2
_DRAINING = "Draining"  # a service of a cluster is gone by then, and has no condition
MODEL_STORE = "PACELINE_MODEL_STORE"


class Served:
    """One service, from `open` to `drain`."""

    def __init__(self, plane: Plane, folder: StateFolder) -> None:
        self._plane = plane
        self._folder = folder
        self._startup = StartupWatch(plane.store)
        self._front = FrontDoor(plane.endpoints, self._explain)
        self._url = ""
        self._service: Manifest = plane.service or {}
        self._drains = False

    @classmethod
    async def open(
        cls, service: Manifest, folder: StateFolder, address: tuple[str, int], environment: Mapping[str, str]
    ) -> Served:
        """Listen on the address (port 0: any free one). Nothing is started before that works.

        Raises:
            AddressInUse: another program listens there, or this user may not.
        """
        node = Node(await machine.detect(), folder.pods, folder.gpu_claims, model_store(environment), environment)
        served = cls(Plane(service, IMAGE, node, _ignore), folder)
        host, port = address
        try:
            port = await served._front.start(host, port)
        except OSError as error:
            raise refusal(host, port, error, environment) from None
        served._url = f"http://{_reachable(host)}:{port}"
        shutil.rmtree(folder.pods, ignore_errors=True)  # of an earlier time
        return served

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._plane.run())
            group.create_task(self._startup.run())
            group.create_task(self._publish())

    def snapshot(self) -> Snapshot:
        """The service as it is now, or as it was when it was deleted."""
        self._service = self._plane.service or self._service
        status = {**self._service.get("status", {}), "url": self._url}
        pods = ({"metadata": pod["metadata"], "status": pod["status"]} for pod in self._plane.store.list("Pod"))
        return Snapshot(
            os.getpid(), self._url, {**self._service, "status": status}, tuple(pods), self._startup.starts()
        )

    async def drain(self) -> None:
        """Let running requests finish, refuse new ones meanwhile, and wait until every server has ended."""
        self._drains = True
        service = self._plane.service or self._service
        self._plane.delete()
        self._service = _draining(service)
        await self._plane.emptied()
        self._front.close()
        self._folder.forget()

    def kill(self) -> None:
        """End every server at once."""
        self._plane.kill()

    async def _publish(self) -> None:
        published = None
        while True:
            if (snapshot := self.snapshot()) != published:
                self._folder.write(snapshot)
                published = snapshot
            await asyncio.sleep(_PUBLISH_SECONDS)

    def _explain(self) -> Refusal:
        if self._drains:
            return DRAINING
        why = why_not_ready(condition_of(self.snapshot().service, "Ready"))
        return Refusal(f"{self._plane.key.name} is not ready: {why}", code="not_ready")


def why_not_ready(ready: Manifest) -> str:
    """What a request that finds no server is told, by the condition Ready: one that just went is still True in it."""
    if ready.get("status") == Truth.TRUE:
        return "NotReady: its last server has just gone, and is started again"
    return f"{ready.get('reason', 'Starting')}: {ready.get('message', 'it starts')}"


def _draining(service: Manifest) -> Manifest:
    """The service as it is shown from its deletion to the end of its last server."""
    status, message = service.get("status", {}), "running requests are finished, and no new ones are taken"
    fresh = [
        Condition(ConditionType.READY, Truth.FALSE, _DRAINING, message),
        Condition(ConditionType.PROGRESSING, Truth.TRUE, _DRAINING, message),
    ]
    conditions = settle(status.get("conditions", ()), fresh, service["metadata"]["generation"], datetime.now(UTC))
    return {**service, "status": {**status, "readyReplicas": 0, "conditions": conditions}}


def _ignore(event: EmitEvent) -> None:
    """Transitions are shown from the conditions: a terminal has no list of events."""


def model_store(environment: Mapping[str, str]) -> Path:
    """The folder of models that all local services share: where the server itself would look, without a pod."""
    home = Path(environment.get("HOME", "~")).expanduser()
    return Path(environment.get(MODEL_STORE) or home / ".cache" / "paceline" / "models")


def _reachable(host: str) -> str:
    """An address to connect to, for one to listen on, as it stands in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
