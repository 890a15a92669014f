"""The order in which an operator starts, against an API server that answers as the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from paceline_operator.run import _run
from paceline_operator.settings import OperatorSettings

CRD = Path(__file__).parents[2] / "crds/llmservices.paceline.dev.yaml"
OPENAPI = "/openapi/v3/apis/paceline.dev/v1alpha1"


class FakeApiServer:
    """Publishes the CRD, or an older one, and notes who was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_old = True

    async def answer(self, request: web.Request) -> web.Response:
        """The OpenAPI document; everything else does not exist."""
        self.asked.append(request.path)
        if request.path != OPENAPI:
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        if self.is_old:
            del schema["properties"]["spec"]["properties"]["handover"]
        return web.json_response({"components": {"schemas": {"dev.paceline.v1alpha1.LLMService": schema}}})

    @property
    def was_asked_for_the_lease(self) -> bool:
        """Whether anybody tried to lead."""
        return any("/leases" in path for path in self.asked)


@asynccontextmanager
async def running(api: FakeApiServer, folder: Path, free_port: Callable[[], int]) -> AsyncIterator[str]:
    """An operator that runs against this API server; the address of its /readyz."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    async with TestServer(app) as server:
        cluster = {"name": "c", "cluster": {"server": str(server.make_url("")).rstrip("/")}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "clusters": [cluster],
                    "contexts": [context],
                    "users": [{"name": "u", "user": {}}],
                    "current-context": "c",
                }
            )
        )
        ports = {"health_port": free_port(), "metrics_port": free_port()}
        settings = OperatorSettings(server_image="i", kubeconfig=str(kubeconfig), lease_seconds=1, **ports)
        task = asyncio.create_task(_run(settings))
        try:
            yield f"http://127.0.0.1:{ports['health_port']}/readyz"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def readiness(url: str, status: int, words: str) -> None:
    """Wait until the probe answers so."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == status and words in await answer.text():
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.02)


async def test_an_operator_beside_an_old_crd_is_not_ready_and_leaves_the_lease_to_its_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    """Ready, it would let an upgrade delete the operator that works, and then wait for ever in its place."""
    monkeypatch.setattr("paceline_operator.crd._INTERVAL_SECONDS", 0.02)
    api = FakeApiServer()
    async with running(api, tmp_path, free_port) as readyz:
        await readiness(readyz, 503, "it lacks spec.handover")
        assert not api.was_asked_for_the_lease
        api.is_old = False
        await readiness(readyz, 200, "ok")
        async with asyncio.timeout(60):
            while not api.was_asked_for_the_lease:
                await asyncio.sleep(0.02)
