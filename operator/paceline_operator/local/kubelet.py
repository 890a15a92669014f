"""The kubelet of local mode: keeps one `PodRunner` for each pod of the store. Called by `cluster`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from paceline_operator.cluster import Manifest
from paceline_operator.local.placements import Placements
from paceline_operator.local.runner import Node, PodRunner, log_file
from paceline_operator.local.store import Store
from paceline_operator.ownership import is_alive


class Kubelet:
    """Runs all pods of a store on a node."""

    def __init__(self, store: Store, node: Node) -> None:
        self._store = store
        self._node = node
        self._runners: dict[str, PodRunner] = {}
        self._placements = Placements(node.machine, node.claims)

    async def run(self) -> None:
        """Follow the store until cancelled; processes that still run then are killed."""
        version = -1
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            while True:
                version = await self._store.wait_for_change(version)
                for pod in self._store.list("Pod"):
                    if pod["metadata"]["name"] not in self._runners:
                        group.create_task(self._run(pod, session))
                    elif not is_alive(pod):
                        self._runners[pod["metadata"]["name"]].stop()

    def log(self, pod_name: str) -> Path:
        """Where a pod's output goes."""
        return log_file(self._node.folder, pod_name)

    def processes(self) -> dict[str, int]:
        """Pods that run, and the process that leads each one's session."""
        pids = {name: runner.pid for name, runner in self._runners.items()}
        return {name: pid for name, pid in pids.items() if pid is not None}

    def kill(self) -> None:
        """End every process at once."""
        for runner in self._runners.values():
            runner.kill()

    async def _run(self, pod: Manifest, session: aiohttp.ClientSession) -> None:
        name = pod["metadata"]["name"]
        runner = self._runners[name] = PodRunner(pod, self._store, self._node, self._placements, session)
        if not is_alive(pod):
            runner.stop()
        try:
            await runner.run()
        finally:
            self._placements.free(name)
            del self._runners[name]
            self._store.remove("Pod", name)
