"""Limits, counts and cost of a tenant, as its clients see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from paceline_server.config import ServerConfig, parse
from paceline_server.config.tenants import PricesConfig
from paceline_server.engine.interface import FinishReason, Task
from paceline_server.engine.status import EngineStats
from paceline_server.gateway.cost import cost_of
from paceline_server.keys import hash_key
from paceline_server.testing import FakeEngine, Served, served

A = 66
KEYS = {"team-a": "sk-team-a-0123456789", "team-b": "sk-team-b-0123456789"}
PROMPT = [5] * 10
PRICES = {"input_per_million": 2.0, "cached_input_per_million": 0.5, "output_per_million": 8.0}


def config(gateway: Mapping[str, Any] = MappingProxyType({}), /, **tenants: dict[str, Any]) -> ServerConfig:
    """Tenants by name (with _ for -), each with its key; keys of the group `gateway` may be given."""
    named = [{"name": name.replace("_", "-"), **fields} for name, fields in tenants.items()]
    return parse({
        "gateway": {"host": "127.0.0.1", "port": 0, **gateway},
        "engine": {"model_path": "/models/tiny", "served_model_names": ("tiny",)},
        "tenants": [{"key_hashes": [hash_key(KEYS[tenant["name"]])], **tenant} for tenant in named],
    })  # fmt: skip


async def post(server: Served, tenant: str = "team-a", **fields: Any) -> tuple[Any, Any]:
    response = await server.client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": PROMPT, "max_tokens": 5, **fields},
        headers={"Authorization": f"Bearer {KEYS[tenant]}"},
    )
    return response, (await response.json() if response.content_type == "application/json" else await response.text())


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_limit_reached_is_a_429_in_openais_words_and_of_that_tenant_alone(folder: Path, streamed: bool) -> None:
    engine = FakeEngine(folder, [A])
    async with served(engine, config(team_a={"requests_per_minute": 2}, team_b={})) as server:
        first, _ = await post(server, stream=streamed)
        await post(server, stream=streamed)
        refused, answer = await post(server, stream=streamed)
        other, _ = await post(server, "team-b", stream=streamed)
        numbers = server.scrape()
    assert (first.status, refused.status, other.status) == (200, 429, 200)
    assert answer["error"]["code"] == "rate_limit_exceeded"
    assert answer["error"]["type"] == "requests"
    assert 1 <= int(refused.headers["Retry-After"]) <= 61
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert not any(name.lower().startswith("x-ratelimit") for name in other.headers)
    assert numbers['paceline_tenant_rejections_total{reason="requests_per_minute",tenant="team-a"}'] == 1
    assert numbers['paceline_rejections_total{reason="insufficient_allowance"}'] == 1
    assert len(engine.requests) == 3


async def test_tokens_are_those_of_prompt_and_answer_and_never_reach_the_engine_beyond_the_limit(
    folder: Path,
) -> None:
    engine = FakeEngine(folder, [A])  # an answer of two tokens, with the one that ends it
    async with served(engine, config(team_a={"tokens_per_minute": 30})) as server:
        first, _ = await post(server)
        second, answer = await post(server, max_tokens=9)
        third, _ = await post(server, max_tokens=8)
    assert (first.status, second.status, third.status) == (200, 429, 200)
    assert first.headers["x-ratelimit-remaining-tokens"] == "15", "the reservation counts when the head goes out"
    assert (answer["error"]["type"], answer["error"]["code"]) == ("tokens", "rate_limit_exceeded")
    assert "12 are used or reserved" in answer["error"]["message"]
    assert len(engine.requests) == 2


async def test_a_long_answer_without_a_limit_counts_before_it_ends(folder: Path) -> None:
    hold = asyncio.Event()
    engine = FakeEngine(folder, [(A,) * 300, hold], max_model_len=1000)
    async with served(engine, config(team_a={"tokens_per_minute": 400})) as server:
        long = asyncio.create_task(post(server, max_tokens=None))
        await engine.until(lambda engine: engine.outputs == 1)
        refused, answer = await post(server, max_tokens=90)
        hold.set()
        assert (await long)[0].status == 200
    assert refused.status == 429
    assert "310 are used or reserved" in answer["error"]["message"]


async def test_a_used_up_day_is_a_quota_error_that_clients_do_not_repeat(folder: Path) -> None:
    async with served(FakeEngine(folder, [A]), config(team_a={"daily_tokens": 20})) as server:
        await post(server)
        refused, answer = await post(server)
    assert (refused.status, answer["error"]["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert 0 < int(refused.headers["Retry-After"]) <= 86_400


async def test_what_we_refuse_costs_nothing_and_a_prompt_that_its_client_abandons_counts(folder: Path) -> None:
    hold = asyncio.Event()
    engine = FakeEngine(folder, lambda request: [FinishReason.TIMEOUT] if request.timeout else [hold])
    async with served(engine, config(team_a={"tokens_per_minute": 1000})) as server:
        expired, _ = await post(server, timeout=5)
        assert expired.status == 504
        abandoned = asyncio.create_task(post(server, max_tokens=100))
        await engine.until(lambda engine: len(engine.requests) == 2)
        abandoned.cancel()
        await engine.until(lambda engine: len(engine.aborted) == 2)
        refused, _ = await post(server, prompt=[])
        after, _ = await post(server, timeout=5)
    assert refused.status == 400
    assert after.headers["x-ratelimit-remaining-tokens"] == str(1000 - 10 - 15)


async def test_a_request_whose_place_goes_to_another_tenant_is_a_503_and_costs_nothing(folder: Path) -> None:
    """Two of team A wait, which is all that may; team B's request ends the newer one."""
    hold = asyncio.Event()
    engine = FakeEngine(folder, [hold, A], stats=EngineStats(running=64))
    places = {"backpressure": {"max_queued_requests": 2}}
    async with served(engine, config(places, team_a={"tokens_per_minute": 1000}, team_b={})) as server:
        older = asyncio.create_task(post(server))
        await engine.until(lambda engine: len(engine.requests) == 1)
        newer = asyncio.create_task(post(server))
        await engine.until(lambda engine: len(engine.requests) == 2)
        other = asyncio.create_task(post(server, "team-b"))
        refused, answer = await newer
        assert engine.aborted == [engine.requests[1].request_id]
        hold.set()
        answered = [await older, await other]
        after, _ = await post(server)
    assert (refused.status, answer["error"]["code"]) == (503, "queue_full")
    assert int(refused.headers["Retry-After"]) >= 1
    assert [response.status for response, _ in answered] == [200, 200]
    assert after.headers["x-ratelimit-remaining-tokens"] == str(1000 - 12 - 15), (
        "the older one's, and its own reservation"
    )


@pytest.mark.parametrize(
    ("fields", "status"), [({"colour": "red"}, 400), ({"prompt": [400]}, 400), ({"max_tokens": 200}, 429)]
)
async def test_a_request_that_is_refused_for_what_is_in_it_takes_nobodys_place(
    folder: Path, fields: dict[str, Any], status: int
) -> None:
    """A mistake, or a limit of its own tenant's: it came to a queue that team A fills alone."""
    hold = asyncio.Event()
    engine = FakeEngine(folder, [hold, A], stats=EngineStats(running=64))
    places = {"backpressure": {"max_queued_requests": 2}}
    async with served(engine, config(places, team_a={}, team_b={"tokens_per_minute": 100})) as server:
        waiting = [asyncio.create_task(post(server)) for _ in range(2)]
        await engine.until(lambda engine: len(engine.requests) == 2)
        refused, _ = await post(server, "team-b", **fields)
        hold.set()
        answered = [(await one)[0].status for one in waiting]
    assert refused.status == status
    assert answered == [200, 200]


async def test_tokens_are_reserved_for_every_answer_that_a_request_may_give(folder: Path) -> None:
    async with served(FakeEngine(folder, [A]), config(team_a={"tokens_per_minute": 40})) as server:
        refused, answer = await post(server, n=4, max_tokens=8)
        taken, _ = await post(server, n=3, max_tokens=8)
    assert (refused.status, taken.status) == (429, 200)
    assert "this request alone may use 42" in answer["error"]["message"]


def test_cost_is_by_kind_of_token() -> None:
    prices = PricesConfig.model_validate(PRICES)
    assert cost_of(prices, 1_000_000, 400_000, 2_000_000).json() == {
        "input": 1.2,
        "cached_input": 0.2,
        "output": 16.0,
        "total": 17.4,
    }
    uncached = PricesConfig(input_per_million=2.0, output_per_million=0.0)
    assert cost_of(uncached, 10, 4, 1).total == pytest.approx(20e-6)


async def test_usage_tells_the_cost_where_prices_are_configured_streamed_and_whole(folder: Path) -> None:
    engine = FakeEngine(folder, [A])
    async with served(engine, config(team_a={"prices": PRICES}, team_b={})) as server:
        _, whole = await post(server)
        _, text = await post(server, stream=True, stream_options={"include_usage": True})
        _, free = await post(server, "team-b")
        numbers = server.scrape()
    expected = {"input": 6 * 2e-6, "cached_input": 4 * 0.5e-6, "output": 2 * 8e-6, "total": 30e-6}
    streamed = json.loads(text.strip().split("\n\n")[-2].removeprefix("data: "))["usage"]
    assert whole["usage"]["paceline"]["cost"] == pytest.approx(expected)
    assert streamed == whole["usage"]
    assert "paceline" not in free["usage"]
    assert numbers['paceline_tenant_cost_total{tenant="team-a"}'] == pytest.approx(60e-6)
    assert 'paceline_tenant_cost_total{tenant="team-b"}' not in numbers
    kinds = {
        kind: numbers[f'paceline_tenant_tokens_total{{kind="{kind}",tenant="team-a"}}']
        for kind in expected
        if kind != "total"
    }
    assert kinds == {"input": 12, "cached_input": 8, "output": 4}


async def test_nobody_adds_a_series_to_the_metrics_by_calling(folder: Path) -> None:
    """Labels come from the configuration alone."""
    async with served(FakeEngine(folder, [A]), config(team_a={}, team_b={})) as server:
        before = {name for name in server.scrape() if "tenant" in name}
        for number in range(20):
            headers = {"Authorization": f"Bearer sk-unknown-{number:010}"}
            await server.client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"}, headers=headers)
        await post(server)
        assert {name for name in server.scrape() if "tenant" in name} == before


async def test_embeddings_are_counted_and_priced_as_prompts_without_an_answer(folder: Path) -> None:
    limits = {"prices": PRICES, "tokens_per_minute": 20, "requests_per_minute": 3}
    async with served(FakeEngine(folder, task=Task.EMBED), config(team_a=limits)) as server:
        headers = {"Authorization": f"Bearer {KEYS['team-a']}"}
        body = {"model": "tiny", "input": PROMPT}
        refused = await server.client.post("/v1/embeddings", json=body)
        answers = [await server.client.post("/v1/embeddings", json=body, headers=headers) for _ in range(3)]
        usage = (await answers[0].json())["usage"]
        numbers = server.scrape()
    assert (refused.status, [answer.status for answer in answers]) == (401, [200, 200, 429])
    assert answers[1].headers["x-ratelimit-remaining-tokens"] == "0"
    assert usage["paceline"]["cost"]["total"] == pytest.approx(10 * 2e-6)
    assert numbers['paceline_tenant_tokens_total{kind="input",tenant="team-a"}'] == 20
    assert numbers['paceline_tenant_tokens_total{kind="output",tenant="team-a"}'] == 0
