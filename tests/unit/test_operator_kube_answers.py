"""How the API server's answers become our errors: what is worth asking again, and what its user has to hear of."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client

from paceline_operator.cluster import Apply, Delete, EmitEvent, Key, Plan
from paceline_operator.errors import ChildRefused, ClusterUnavailable, PacelineError, RequestRefused, StaleObservation
from paceline_operator.kube import KubeClient
from paceline_operator.kube_cluster import KubeCluster

WRONG_TYPE = "failed to create typed patch object (a/b): .spec.nodeSelector.gpu: expected string, got true"
WEBHOOK = 'Internal error occurred: failed calling webhook "pods.example": context deadline exceeded'
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "b", "namespace": "a"}}


def status_object(message: str, **fields: Any) -> str:
    """An answer of the API server itself."""
    return json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, **fields})


@asynccontextmanager
async def answering(status: int, text: str) -> AsyncIterator[KubeClient]:
    """A client to which everything is answered so."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, KubeClient(client.Configuration(host=str(server.make_url("")))) as kube:
        yield kube


async def test_where_there_are_no_credentials_it_is_said_where_they_come_from(tmp_path: Path) -> None:
    """What `docker run` of the operator's image prints."""
    with pytest.raises(ClusterUnavailable, match=r"in a pod of the chart, .* --kubeconfig or KUBECONFIG"):
        await KubeClient.connect(str(tmp_path / "nowhere"))


async def apply_error(status: int, text: str) -> PacelineError:
    """What an apply raises that is answered so."""
    async with answering(status, text) as kube:
        with pytest.raises(PacelineError) as caught:
            await kube.apply_object("/x", DEPLOYMENT, force=True)
    return caught.value


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (500, WRONG_TYPE, ""),
        (500, "failed to create typed patch object: .spec.foo: field not declared in schema", ""),
        (500, WEBHOOK, "InternalError"),
        (422, "Deployment.apps is invalid", "Invalid"),
        (403, "exceeded quota", "Forbidden"),
    ],
)
async def test_an_apply_to_which_the_api_server_says_no_is_refused_in_its_words(
    status: int, message: str, reason: str
) -> None:
    """Server-side apply answers many of its user's mistakes with 500."""
    error = await apply_error(status, status_object(message, reason=reason))
    assert isinstance(error, RequestRefused)
    assert str(error) == message


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (429, status_object("too many requests", reason="TooManyRequests")),
        (500, status_object("etcdserver: leader changed")),
        (500, status_object("the server cannot complete the operation at this time", reason="ServerTimeout")),
        (500, "a proxy's own page"),
        (502, "a proxy's own page"),
        (503, status_object("the server is shutting down", reason="ServiceUnavailable")),
        (504, status_object("the request timed out", reason="Timeout")),
    ],
)
async def test_an_apply_that_met_a_bad_moment_may_succeed_later(status: int, text: str) -> None:
    assert isinstance(await apply_error(status, text), ClusterUnavailable)


async def test_other_requests_that_the_api_server_fails_at_may_succeed_later() -> None:
    """A lease must not be given up for one answer of 500."""
    async with answering(500, status_object("failed")) as kube:
        with pytest.raises(ClusterUnavailable):
            await kube.replace_object("/x", DEPLOYMENT)


async def test_an_apply_to_a_namespace_that_goes_is_about_the_moment() -> None:
    text = status_object("unable to create new content in namespace a because it is being terminated")
    assert isinstance(await apply_error(403, text), StaleObservation)


async def test_a_child_with_a_value_of_the_wrong_type_is_refused_by_its_name() -> None:
    async with answering(500, status_object(WRONG_TYPE)) as kube:
        with pytest.raises(ChildRefused, match=r"Deployment b: .*gpu: expected string"):
            await KubeCluster(kube).execute(Key("a", "b"), Plan((Apply(DEPLOYMENT),)))


@pytest.mark.parametrize(("status", "message"), [(403, "configmaps is forbidden"), (500, WEBHOOK)])
async def test_a_child_that_may_not_be_deleted_is_told_by_its_name(status: int, message: str) -> None:
    """Nothing after it in the plan is carried out, the status neither: without a refusal it would stand still."""
    async with answering(status, status_object(message)) as kube:
        with pytest.raises(ChildRefused, match="ConfigMap b-1: cannot be deleted: "):
            await KubeCluster(kube).execute(Key("a", "b"), Plan((Delete("v1", "ConfigMap", "b-1", "uid"),)))


async def test_an_event_that_is_not_taken_is_lost_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """The status that it tells of is stored before it: a second pass would find no transition any more."""
    key, event = Key("a", "b"), EmitEvent("uid", "Warning", "Crashed", "Ready=False: it crashed")
    async with answering(429, status_object("too many requests")) as kube:
        await KubeCluster(kube).execute(key, Plan((event,)))
    assert "a/b: event Crashed not posted" in caplog.text
