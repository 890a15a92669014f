"""Tier, priority and deadline: what a client asks reaches the engine, and the client learns what became of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline_server.config import ServerConfig, parse
from paceline_server.engine.interface import FinishReason, Tier
from paceline_server.errors import DeadlineExceeded, InvalidRequest
from paceline_server.gateway.mistakes import validate
from paceline_server.gateway.requests import ChatRequest
from paceline_server.gateway.tenants import EVERYBODY
from paceline_server.gateway.urgency import TIMEOUT_HEADER, Urgency, urgency
from paceline_server.testing import FakeEngine, Served, served

A = 66
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
both_endpoints = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completions"]
)


def config(**scheduling: Any) -> ServerConfig:
    engine = {"model_path": "/models/tiny", "served_model_names": ("tiny",)}
    return parse({"gateway": {"host": "127.0.0.1", "port": 0}, "engine": engine, "scheduling": scheduling})


def asked(header: str | None = None, scheduling: dict[str, Any] | None = None, **fields: Any) -> Urgency:
    group = config(**(scheduling or {})).scheduling
    return urgency(validate(ChatRequest, {**CHAT, **fields}), header, group, EVERYBODY.config)


async def post(server: Served, path: str, body: dict[str, Any], headers: Any = None, **fields: Any) -> Any:
    response = await server.client.post(path, json={**body, **fields}, headers=headers)
    return response, (await response.json() if response.content_type == "application/json" else await response.text())


@pytest.mark.parametrize(
    ("fields", "tier", "word"),
    [
        ({}, Tier.STANDARD, None),
        ({"tier": "batch"}, Tier.BATCH, None),
        ({"tier": "interactive", "service_tier": "auto"}, Tier.INTERACTIVE, "priority"),
        ({"service_tier": "auto"}, Tier.STANDARD, "default"),
        ({"service_tier": "default"}, Tier.STANDARD, "default"),
        ({"service_tier": "flex"}, Tier.BATCH, "flex"),
        ({"service_tier": "priority"}, Tier.INTERACTIVE, "priority"),
    ],
)
def test_a_tier_has_a_name_of_ours_and_one_of_openais(fields: dict[str, Any], tier: Tier, word: str | None) -> None:
    found = asked(**fields)
    assert (found.tier, found.service_tier) == (tier, word)


@pytest.mark.parametrize(
    ("body", "header", "tier", "least"),
    [
        (None, None, None, None),
        (5, None, None, 5),
        (None, "2.5", None, 2.5),
        (None, None, 30.0, 30),
        (5, "2", 30.0, 2),
        (5, "9", 30.0, 5),
        (99, "98", 30.0, 30),
    ],
)
def test_the_smallest_timeout_counts(
    body: float | None, header: str | None, tier: float | None, least: float | None
) -> None:
    found = asked(header, {"tiers": {"standard": {"timeout_seconds": tier}}}, timeout=body)
    assert found.timeout == least


def test_a_timeout_of_a_tier_holds_for_that_tier_alone() -> None:
    scheduling = {"tiers": {"batch": {"timeout_seconds": 3.0}}}
    assert asked(None, scheduling, tier="batch").timeout == 3
    assert asked(None, scheduling, tier="interactive").timeout is None


@pytest.mark.parametrize(
    "text", ["", "soon", "0", "-1", "nan", "inf", "86401", "1" * 5000, "1,5", "1_0", "1e3", "+1", "١"]
)
def test_a_header_that_is_no_number_of_seconds_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=TIMEOUT_HEADER) as caught:
        asked(text)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [("timeout", 0), ("timeout", -1), ("timeout", 86_401), ("timeout", "5"), ("timeout", True), ("priority", 1001),
     ("priority", 1.5), ("tier", "gold"), ("tier", 1), ("service_tier", "scale")],
)  # fmt: skip
def test_a_value_that_means_nothing_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**{field: value})
    assert caught.value.param == field


def test_two_names_for_the_tier_are_one_too_many() -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(tier="batch", service_tier="flex")
    assert caught.value.param == "service_tier"


@pytest.mark.parametrize("policy", ["slo", "fcfs", "sjf"])
def test_a_priority_is_refused_where_the_policy_would_ignore_it(policy: str) -> None:
    with pytest.raises(InvalidRequest, match=f"policy here is {policy}"):
        asked(None, {"policy": policy}, priority=-1)
    assert asked(None, {"policy": policy}, priority=0).priority == 0
    assert asked(None, {"policy": "priority"}, priority=-1).priority == -1


def test_the_time_that_has_passed_in_the_gateway_counts() -> None:
    assert Urgency(Tier.STANDARD, timeout=2.0).remaining(0.5) == 1.5
    assert Urgency(Tier.STANDARD).remaining(1e9) is None
    with pytest.raises(DeadlineExceeded):
        Urgency(Tier.STANDARD, timeout=2.0).remaining(2.0)


@both_endpoints
async def test_what_the_client_asks_for_reaches_the_engine(folder: Path, path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(folder, [A])
    async with served(engine, config(policy="priority")) as server:
        response, answer = await post(server, path, body, service_tier="flex", priority=3, timeout=9)
    assert (response.status, answer["service_tier"]) == (200, "flex")
    (request,) = engine.requests
    assert (request.tier, request.priority) == (Tier.BATCH, 3)
    assert request.timeout is not None
    assert 8 < request.timeout < 9


@both_endpoints
async def test_a_request_that_expired_in_line_is_a_504_that_clients_do_not_repeat(
    folder: Path, path: str, body: dict[str, Any]
) -> None:
    async with served(FakeEngine(folder, [FinishReason.TIMEOUT])) as server:
        for streamed in (False, True):
            response, answer = await post(server, path, body, timeout=1, stream=streamed)
            assert (response.status, answer["error"]["code"]) == (504, "deadline_exceeded")
            assert response.headers["x-should-retry"] == "false"
        assert server.scrape()['paceline_rejections_total{reason="deadline_exceeded"}'] == 2


@both_endpoints
async def test_an_answer_that_ran_out_of_time_is_cut_short_in_words_that_every_client_knows(
    folder: Path, path: str, body: dict[str, Any]
) -> None:
    async with served(FakeEngine(folder, [A, A, FinishReason.TIMEOUT])) as server:
        _, whole = await post(server, path, body, timeout=1)
        _, text = await post(server, path, body, timeout=1, stream=True, stream_options={"include_usage": True})
    *chunks, done = [frame.removeprefix("data: ") for frame in text.strip().split("\n\n")]
    assert done == "[DONE]"
    last, usage = json.loads(chunks[-2]), json.loads(chunks[-1])["usage"]
    for (choice,), used in ((whole["choices"], whole["usage"]), (last["choices"], usage)):
        assert choice["finish_reason"] == "length"
        assert choice["incomplete_details"] == {"reason": "deadline_exceeded"}
        assert used["completion_tokens"] == 2


async def test_an_answer_that_ends_by_itself_has_no_details(folder: Path) -> None:
    async with served(FakeEngine(folder, [A])) as server:
        _, answer = await post(server, "/v1/completions", COMPLETION, timeout=60)
    assert "incomplete_details" not in answer["choices"][0]
    assert "service_tier" not in answer


async def test_a_body_that_outlasts_the_deadline_never_reaches_the_engine(folder: Path) -> None:
    async def slowly() -> Any:
        yield json.dumps(COMPLETION).encode()
        await asyncio.sleep(0.05)

    engine = FakeEngine(folder, [A])
    async with served(engine) as server:
        response = await server.client.post("/v1/completions", data=slowly(), headers={TIMEOUT_HEADER: "0.01"})
        assert response.status == 504
    assert engine.requests == []
