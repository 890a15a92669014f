"""Phases are shown as the server tells them; one that does not tell them has started when its pod is ready."""

from __future__ import annotations

import asyncio

from paceline_operator.cluster import Manifest
from paceline_operator.local.startup import StartupWatch
from paceline_operator.local.store import Store

UNREACHABLE = 1  # nobody listens on port 1


def make_pod(*, ready: bool) -> Manifest:
    container = {"name": "server", "ports": [{"name": "http", "containerPort": UNREACHABLE}]}
    status = {
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "containerStatuses": [{"name": "server", "restartCount": 0, "state": {"running": {}}}],
    }
    return {"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [container]}, "status": status}


async def test_a_server_that_does_not_answer_is_starting_until_its_pod_is_ready() -> None:
    store = Store()
    pod = store.apply(make_pod(ready=False))
    watch = StartupWatch(store)
    running = asyncio.create_task(watch.run())
    while not watch.phases():
        await asyncio.sleep(0.01)
    (phase,) = watch.phases()["a"]
    assert not phase.done
    store.set_status("Pod", "a", make_pod(ready=True)["status"])
    async with asyncio.timeout(60):
        while not all(phase.done for phase in watch.phases()["a"]):
            await asyncio.sleep(0.01)
    store.remove("Pod", pod["metadata"]["name"])
    async with asyncio.timeout(60):
        while watch.phases():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
