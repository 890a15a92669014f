"""Rounds of the collector: services and pods come and go, the API server too."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from paceline_operator import names
from paceline_operator.adapter.collector import Collector
from paceline_operator.adapter.discover import PODS_PATH, SERVICES_PATH, service_path
from paceline_operator.adapter.errors import UnknownService
from paceline_operator.adapter.testing import FakeObjects
from paceline_operator.cluster import Key
from paceline_operator.errors import ClusterUnavailable

KEY = Key("default", "demo")


class Pod:
    """A server's /metrics with a settable number of running requests; `broken` makes it answer 500."""

    def __init__(self) -> None:
        self.running = 0
        self.broken = False
        self.scrapes = 0
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        self.server = TestServer(app)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        if self.broken:
            raise web.HTTPInternalServerError
        return web.Response(
            text=f"paceline_requests_waiting 0\npaceline_requests_running {self.running}\n"
            'paceline_ttft_seconds_bucket{le="1"} 0\npaceline_ttft_seconds_bucket{le="+Inf"} 0\n'
        )

    def manifest(self, of: str = KEY.name) -> dict[str, Any]:
        """The pod as the API server lists it."""
        port = {"name": names.PORT_NAME, "containerPort": self.server.port}
        return {
            "metadata": {
                "uid": f"pod-{self.server.port}",
                "namespace": KEY.namespace,
                "labels": names.common_labels(of),
                "creationTimestamp": "2030-01-01T00:00:00Z",
            },
            "spec": {"containers": [{"name": names.CONTAINER, "ports": [port]}]},
            "status": {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }


def service(name: str) -> dict[str, Any]:
    return {"metadata": {"namespace": KEY.namespace, "name": name}, "spec": {"model": "hf://a/b"}}


@pytest.fixture
def source() -> FakeObjects:
    return FakeObjects()


@pytest.fixture
async def pod(source: FakeObjects) -> AsyncIterator[Pod]:
    pod = Pod()
    async with pod.server:
        source.collections = {SERVICES_PATH: [service("demo")], PODS_PATH: [pod.manifest()]}
        yield pod


class Clock:
    """Time that moves when told."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def collector(source: FakeObjects, clock: Clock) -> AsyncIterator[Collector]:
    async with aiohttp.ClientSession() as session:
        yield Collector(source, session, clock=clock)


async def test_a_round_finds_the_service_and_its_numbers(collector: Collector, pod: Pod) -> None:
    pod.running = 8
    await collector.refresh()
    assert (await collector.pressure(KEY)).queue_depth == 8


async def test_reads_between_two_rounds_cost_no_scrape(collector: Collector, pod: Pod) -> None:
    await collector.refresh()
    for _ in range(5):
        await collector.pressure(KEY)
    assert pod.scrapes == 1


async def test_numbers_are_trusted_after_two_rounds(collector: Collector, pod: Pod) -> None:
    assert not collector.ready
    await collector.refresh()
    assert not collector.ready
    await collector.refresh()
    assert collector.ready


async def test_a_service_made_since_the_last_round_is_known_and_holds_its_replicas(
    collector: Collector, pod: Pod, source: FakeObjects
) -> None:
    await collector.refresh()
    new = Key(KEY.namespace, "new")
    source.put(service_path(new), service("new"))
    pressure = await collector.pressure(new)
    assert (pressure.queue_depth, pressure.ttft_pressure) == (0, 1.0)


async def test_asking_for_unknown_services_costs_no_scrape(collector: Collector, pod: Pod) -> None:
    await collector.refresh()
    for _ in range(10):
        with pytest.raises(UnknownService, match="default/nothing"):
            await collector.pressure(Key("default", "nothing"))
    assert pod.scrapes == 1


async def test_a_question_before_the_first_round_waits_for_it(collector: Collector, pod: Pod) -> None:
    pod.running = 8
    assert (await collector.pressure(KEY)).queue_depth == 8


async def test_a_deleted_service_is_forgotten(collector: Collector, pod: Pod, source: FakeObjects) -> None:
    await collector.refresh()
    source.collections[SERVICES_PATH].clear()
    await collector.refresh()
    assert collector._services == {}
    with pytest.raises(UnknownService):
        await collector.pressure(KEY)


async def test_a_broken_pod_leaves_its_last_numbers_and_one_line_in_the_log(
    collector: Collector, pod: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    pod.running = 8
    await collector.refresh()
    pod.broken = True
    for _ in range(3):
        await collector.refresh()
    assert (await collector.pressure(KEY)).queue_depth == 8
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_an_api_server_that_is_down_leaves_the_last_numbers(
    collector: Collector, pod: Pod, source: FakeObjects
) -> None:
    pod.running = 8
    await collector.refresh()
    source.down = True
    with pytest.raises(ClusterUnavailable):
        await collector.refresh()
    assert (await collector.pressure(KEY)).queue_depth == 8
    assert not collector.stalled


async def test_a_loop_that_does_not_move_is_stalled(collector: Collector, pod: Pod, clock: Clock) -> None:
    await collector.refresh()
    clock.now += 59
    assert not collector.stalled
    clock.now += 2
    assert collector.stalled
