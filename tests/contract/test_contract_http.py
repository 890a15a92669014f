"""The paths and metric names through which the two sides talk: what one offers is what the other asks for."""

import math
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import disable_created_metrics

from paceline_operator.adapter.scrape import parse_sample
from paceline_operator.desired import render
from paceline_operator.local import front
from paceline_operator.local.prompt import example
from paceline_operator.pods import is_drain
from paceline_operator.spec import parse_service
from paceline_server import cli
from paceline_server.config import parse
from paceline_server.engine.interface import Task
from paceline_server.gateway.app import create_app
from paceline_server.gateway.state import GATEWAY
from paceline_server.testing import FakeEngine, served, write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture
async def gateway(folder):
    disable_created_metrics()  # as `serve` does
    config = parse({"engine": {"model_path": str(folder), "served_model_names": ["m"]}})
    return create_app(config, FakeEngine(folder))


def container():
    service = parse_service(
        {"metadata": {"name": "s", "namespace": "default", "uid": "u"}, "spec": {"model": "hf://org/name"}}
    )
    deployment = next(child for child in render(service, "image").children if child["kind"] == "Deployment")
    return deployment["spec"]["template"]["spec"]["containers"][0]


def test_every_probe_of_the_pod_is_a_path_of_the_server(gateway):
    offered = {
        (route.method, route.resource.canonical) for route in gateway.router.routes() if route.resource is not None
    }
    probes = {kind: spec["httpGet"]["path"] for kind, spec in container().items() if kind.endswith("Probe")}
    assert set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert {("GET", path) for path in probes.values()} <= offered
    assert ("GET", "/metrics") in offered
    assert ("POST", "/drain") in offered


def test_what_the_adapter_scrapes_is_what_the_server_exposes(gateway):
    exposition = gateway[GATEWAY].metrics.exposition().decode()
    sample = parse_sample(exposition, at=0.0)
    assert sample.depth == 0.0
    assert not math.isnan(sample.depth)


def test_a_request_shows_up_in_the_adapters_histogram(gateway):
    metrics = gateway[GATEWAY].metrics
    before = parse_sample(metrics.exposition().decode(), at=0.0).ttft
    metrics.ttft.observe(0.2)
    after = parse_sample(metrics.exposition().decode(), at=1.0).ttft
    assert before != after


def test_every_metric_of_the_server_is_on_the_reference_page(gateway):
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    exposition = gateway[GATEWAY].metrics.exposition().decode()
    exposed = {line.split()[2] for line in exposition.splitlines() if line.startswith("# TYPE ")}
    assert exposed, "nothing is exposed"
    missing = {name for name in exposed if f"`{name}`" not in page}
    assert not missing, "describe them in docs/reference/metrics.md"


async def test_local_mode_refuses_during_a_drain_as_the_server_does(gateway):
    async with TestClient(TestServer(gateway)) as client:
        await client.post("/drain")
        answer = await client.post("/v1/chat/completions", json={})
        assert answer.status == 503
        assert answer.headers["Retry-After"] == str(front.DRAINING.retry_after)
        assert await answer.json() == front.DRAINING.envelope()


def test_the_last_words_of_a_drained_server_are_the_ones_that_the_operator_knows():
    assert is_drain({"exitCode": 0, "message": cli._DRAINED})
    assert not is_drain({"exitCode": 1, "message": cli._DRAINED})


@pytest.mark.parametrize(("task", "path"), [("generate", "/v1/chat/completions"), ("embed", "/v1/embeddings")])
async def test_paceline_up_shows_a_command_that_the_served_model_answers(folder, task, path):
    async with served(FakeEngine(folder, task=Task(task))) as up:
        assert f"{up.url}{path} " in await example(up.url, "tiny")
