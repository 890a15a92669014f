"""Starts are shown as the servers tell them; one that does not tell its own has started when its pod is ready."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from paceline_operator.cluster import Manifest
from paceline_operator.local.startup import StartupWatch
from paceline_operator.local.store import Store

UNREACHABLE = 1  # nobody listens on port 1


def make_pod(*, ready: bool, port: int | None = UNREACHABLE) -> Manifest:
    container = {"name": "server", "ports": [{"name": "http", "containerPort": port}]}
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
    while not watch.starts():
        await asyncio.sleep(0.01)
    (phase,) = watch.starts()["a"].phases
    assert not phase.done
    store.set_status("Pod", "a", make_pod(ready=True)["status"])
    async with asyncio.timeout(60):
        while not all(phase.done for phase in watch.starts()["a"].phases):
            await asyncio.sleep(0.01)
    store.remove("Pod", pod["metadata"]["name"])
    async with asyncio.timeout(60):
        while watch.starts():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_server_is_asked_until_it_is_ready_and_its_warnings_are_in_words_of_the_spec() -> None:
    """Between two phases none is under way; what makes it slower is known at the end."""
    between = {"ready": False, "phases": [{"name": "load_weights", "seconds": 1.0}], "warnings": []}
    ready = {**between, "ready": True, "warnings": ["slower: engine.dtype float16"]}
    answers = [between, ready]

    async def readyz(_: web.Request) -> web.Response:
        return web.json_response(answers.pop(0))

    app = web.Application()
    app.router.add_get("/readyz", readyz)
    store = Store()
    async with TestServer(app, host="127.0.0.1") as server:
        store.apply(make_pod(ready=True, port=server.port))
        watch = StartupWatch(store)
        running = asyncio.create_task(watch.run())
        async with asyncio.timeout(60):
            while not (watch.starts() and watch.starts()["a"].over):
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert answers == []
    start = watch.starts()["a"]
    assert [phase.name for phase in start.phases] == ["start_process", "load_weights"]
    assert start.warnings == ("slower: spec.engine.dtype float16",)
