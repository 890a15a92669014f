"""An operator that lacks a right to read says so in the status, undoes nothing, and goes on when it has it again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client
from reconciling import IMAGE, KEY, Stage, serving

from paceline_operator import reconcile as reconcile_module
from paceline_operator.errors import RequestRefused
from paceline_operator.kube import KubeClient
from paceline_operator.kube_cluster import KubeCluster
from paceline_operator.reconcile import reconcile
from paceline_operator.testing import NOW, llmservice, make_pod

RESOURCES = ("pods", "replicasets", "configmaps", "services", "deployments")
REFUSAL = 'pods is forbidden: User "operator" cannot list resource "pods" in API group "" in the namespace "default"'


@pytest.mark.parametrize("resource", RESOURCES)
async def test_what_may_not_be_read_is_told_and_changed_by_nothing(resource: str) -> None:
    """A child that is not seen may be there; and while no pods are, the ConfigMap that they mount looks unused."""
    stage = await serving()
    stage.edit(engine={"maxModelLen": 512})
    await stage.reconcile()
    children = list(stage.cluster.children)
    stage.cluster.unseen = {resource: REFUSAL}
    stage.edit(engine={"maxModelLen": 256})
    again = await reconcile(stage.cluster, KEY, IMAGE, lambda: NOW)
    assert again == reconcile_module.REFUSED_RETRY_SECONDS
    assert list(stage.cluster.children) == children
    assert stage.verdict("Degraded") == ("True", "Forbidden")
    assert REFUSAL in stage.condition("Degraded")["message"]
    assert "helm upgrade" in stage.condition("Degraded")["message"]
    stage.cluster.unseen = {}
    await stage.reconcile()
    assert stage.verdict("Degraded") == ("False", "AsExpected")
    assert list(stage.cluster.children) != children


async def test_refusals_that_come_in_another_order_are_no_news() -> None:
    """The API server is asked for everything at once; a status that is written anew is an event, and a pass again."""
    stage = await serving()
    stage.cluster.unseen = {"pods": "no pods", "services": "no services"}
    await stage.reconcile()
    stage.cluster.unseen = {"services": "no services", "pods": "no pods"}
    assert not await stage.reconcile()


async def test_a_service_that_was_never_seen_has_a_status_all_the_same() -> None:
    stage = Stage()
    stage.cluster.unseen = dict.fromkeys(RESOURCES, REFUSAL)
    await stage.reconcile()
    assert stage.verdict() == ("Unknown", "Forbidden")
    assert stage.service["status"]["readyReplicas"] == 0


async def test_pods_that_are_not_seen_are_counted_as_they_last_were() -> None:
    """Whether they serve is not known; a count of none would have an HPA scale by nothing."""
    stage = await serving(replicas=2)
    stage.cluster.unseen = {"pods": REFUSAL}
    await stage.reconcile()
    assert stage.verdict() == ("Unknown", "Forbidden")
    assert (stage.service["status"]["replicas"], stage.service["status"]["readyReplicas"]) == (2, 2)


async def test_pods_that_are_seen_to_serve_do_so_whatever_else_is_not_seen() -> None:
    stage = await serving()
    stage.cluster.unseen = {"deployments": REFUSAL}
    await stage.reconcile()
    assert stage.verdict() == ("True", "ServingDegraded")


async def test_without_the_events_the_work_goes_on_and_other_failures_come_first() -> None:
    """They explain what nothing else does, and decide nothing."""
    stage = Stage()
    stage.cluster.unseen = {"events": REFUSAL}
    await stage.reconcile()
    assert stage.cluster.children
    assert stage.verdict() == ("False", "Forbidden")
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}}
    stage.run_pods(make_pod(stage.deployment, state=waiting))
    await stage.reconcile()
    assert stage.verdict() == ("False", "ImagePullBackOff")


@asynccontextmanager
async def refusing(*resources: str) -> AsyncIterator[KubeCluster]:
    """A cluster of one service, whose API server shows these resources to nobody."""

    async def answer(request: web.Request) -> web.Response:
        refused = next((one for one in resources if f"/{one}" in request.path), None)
        if refused:
            return web.json_response({"kind": "Status", "message": f"{refused} is forbidden"}, status=403)
        if request.path.endswith("/llmservices/smollm2"):
            return web.json_response(llmservice())
        if request.path.endswith("/smollm2"):
            return web.json_response({"kind": "Status"}, status=404)
        return web.Response(text=json.dumps({"apiVersion": "v1", "kind": "List", "items": []}))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, KubeClient(client.Configuration(host=str(server.make_url("")))) as kube:
        yield KubeCluster(kube)


@pytest.mark.parametrize("resource", [*RESOURCES, "poddisruptionbudgets", "horizontalpodautoscalers"])
async def test_one_refusal_hides_its_resource_and_no_other(resource: str) -> None:
    async with refusing(resource) as cluster:
        assert (await cluster.observe(KEY)).unseen == {resource: f"{resource} is forbidden"}


async def test_a_service_that_may_not_be_read_itself_is_an_error() -> None:
    """There is nothing to write a status to, as far as the operator can know."""
    async with refusing("llmservices") as cluster:
        with pytest.raises(RequestRefused):
            await cluster.observe(KEY)
