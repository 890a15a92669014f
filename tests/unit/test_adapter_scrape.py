"""A pod's /metrics becomes numbers, or an error that says why not; never a zero that nobody reported."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from paceline_operator.adapter.errors import ScrapeError
from paceline_operator.adapter.scrape import MAX_EXPOSITION_BYTES, Sample, fetch_sample, parse_sample, scrape_all

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def exposition(waiting: float = 3, running: float = 4) -> str:
    """Make a page with the library that servers use, two models and some metrics of no interest."""
    registry = CollectorRegistry()
    depth = {
        "paceline_requests_waiting": waiting,
        "paceline_requests_running": running,
        "paceline_kv_cache_usage_ratio": 0.5,
    }
    for name, value in depth.items():
        gauge = Gauge(name, "Some help.", ["model_name"], registry=registry)
        gauge.labels("one").set(value - 1)
        gauge.labels("two").set(1)
    ttft = Histogram("paceline_ttft_seconds", "Help.", ["model_name"], buckets=(0.1, 1.0), registry=registry)
    for model, seconds in (("one", 0.05), ("one", 0.5), ("two", 0.5), ("two", 7.0)):
        ttft.labels(model).observe(seconds)
    return generate_latest(registry).decode()


def test_a_page_of_the_server_becomes_depth_and_ttft_added_up_over_models() -> None:
    sample = parse_sample(exposition(), at=12.0)
    assert (sample.at, sample.waiting, sample.running, sample.depth) == (12.0, 3, 4, 7)
    assert sample.ttft.bounds == (0.1, 1.0, float("inf"))
    assert sample.ttft.counts == (1, 2, 1)


@pytest.mark.parametrize("absent", ["paceline_requests_waiting", "paceline_requests_running", "paceline_ttft_seconds"])
def test_a_page_without_one_of_our_metrics_is_an_error(absent: str) -> None:
    page = "".join(line + "\n" for line in exposition().splitlines() if not line.startswith(absent))
    with pytest.raises(ScrapeError):
        parse_sample(page, at=0)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html>",
        "paceline_requests_waiting{",
        exposition(waiting=float("nan")),
        exposition(running=-5),
        exposition(running=float("inf")),
        exposition().replace('le="0.1"', 'le="soon"'),
        exposition().replace('le="+Inf"', 'le="9"'),
    ],
)
def test_a_page_that_makes_no_sense_is_an_error_and_not_a_number(page: str) -> None:
    with pytest.raises(ScrapeError):
        parse_sample(page, at=0)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def serve(handler: Handler) -> TestServer:
    app = web.Application()
    app.router.add_get("/metrics", handler)
    server = TestServer(app)
    await server.start_server()
    return server


async def test_a_pod_is_fetched_with_the_time_of_its_answer(session: aiohttp.ClientSession) -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=exposition())

    async with await serve(metrics) as server:
        sample = await fetch_sample(session, str(server.make_url("/metrics")), clock=lambda: 99.0)
    assert (sample.at, sample.depth) == (99.0, 7)


async def not_found(_: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


async def elsewhere(_: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("http://169.254.169.254/")


async def not_text(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"\xff\xfe")


async def too_much(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(MAX_EXPOSITION_BYTES // 65536 + 2):
        await response.write(b"#" * 65536)
    return response


@pytest.mark.parametrize("handler", [not_found, elsewhere, not_text, too_much])
async def test_an_answer_that_is_no_metrics_page_is_a_scrape_error(
    session: aiohttp.ClientSession, handler: Handler
) -> None:
    async with await serve(handler) as server:
        with pytest.raises(ScrapeError):
            await fetch_sample(session, str(server.make_url("/metrics")))


@asynccontextmanager
async def good_and_hanging_pods() -> AsyncIterator[dict[str, str]]:
    """The URLs of a pod that answers and of one that does not before the end."""
    release = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=exposition())

    async with await serve(metrics) as good, await serve(hang) as hanging:
        try:
            yield {name: str(server.make_url("/metrics")) for name, server in (("hanging", hanging), ("good", good))}
        finally:
            release.set()


async def test_one_hanging_and_one_dead_pod_do_not_hold_up_the_others(session: aiohttp.ClientSession) -> None:
    async with good_and_hanging_pods() as urls:
        results = await scrape_all(session, urls | {"dead": "http://127.0.0.1:1/metrics"}, timeout_seconds=0.3)
    assert isinstance(results["good"], Sample)
    assert isinstance(results["hanging"], ScrapeError)
    assert isinstance(results["dead"], ScrapeError)
    assert "within 0.3 s" in str(results["hanging"])


async def test_a_pods_time_begins_with_its_turn() -> None:
    """The one connection that there may be is held by a pod that hangs for all of its time."""
    one_connection = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1))
    async with one_connection as session, good_and_hanging_pods() as urls:
        results = await scrape_all(session, urls, timeout_seconds=1.0, at_once=1)
    assert isinstance(results["hanging"], ScrapeError)
    assert isinstance(results["good"], Sample)
