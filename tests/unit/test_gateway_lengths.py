"""Lengths around the context's end, and long prompts beside short ones: through HTTP, on the engine's own core."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from core_engines import CoreEngine

from paceline_server.testing import Served, served

LIMIT = 256
OUTPUTS = (None, 1, 2, LIMIT)


async def complete(server: Served, length: int, output: int | None, **fields: Any) -> tuple[int, Any]:
    """Status and answer to a prompt of a length; of a stream the usage and the reason."""
    body = {"model": "tiny", "prompt": [5 + length % 50] * length, "max_tokens": output, **fields}
    if fields.get("stream"):
        body["stream_options"] = {"include_usage": True}
    async with server.client.post("/v1/completions", json=body) as response:
        if not fields.get("stream") or response.status != 200:
            return response.status, await response.json()
        frames = [frame.removeprefix("data: ") for frame in (await response.text()).strip().split("\n\n")]
    assert frames[-1] == "[DONE]"
    return 200, {**json.loads(frames[-2]), "choices": json.loads(frames[-3])["choices"]}


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [16, 512], ids=["chunked", "whole"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_the_context_is_never_exceeded_and_may_be_used_to_its_last_token(
    folder: Path, streamed: bool, budget: int, prefix_caching: bool
) -> None:
    engine = CoreEngine(folder, length=LIMIT, budget=budget, prefix_caching=prefix_caching)
    async with served(engine) as server:
        for length in (LIMIT - 2, LIMIT - 1):
            for output in OUTPUTS:
                status, answer = await complete(server, length, output, stream=streamed)
                assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
                expected = min(output or LIMIT, LIMIT - length)
                assert answer["usage"]["total_tokens"] == length + expected
                assert (await complete(server, 3, 1))[0] == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prompt_without_room_for_a_token_is_refused_without_a_negative_number(
    folder: Path, streamed: bool
) -> None:
    engine = CoreEngine(folder, length=LIMIT)
    async with served(engine) as server:
        for length in (LIMIT, LIMIT + 1, 10 * LIMIT):
            for output in OUTPUTS:
                status, answer = await complete(server, length, output, stream=streamed)
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
                assert "-" not in answer["error"]["message"]
                assert str(LIMIT) in answer["error"]["message"]
        for output in (0, -1, LIMIT + 1):
            status, answer = await complete(server, 3, output, stream=streamed)
            assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert (await complete(server, 3, 1))[0] == 200
    assert len(engine.requests) == 1


async def test_a_chat_may_fill_the_context_to_its_last_token(folder: Path) -> None:
    async def chat(server: Served, words: int, output: int | None) -> tuple[int, Any]:
        messages = [{"role": "user", "content": "a " * words}]
        body = {"model": "tiny", "messages": messages, "max_tokens": output}
        async with server.client.post("/v1/chat/completions", json=body) as response:
            return response.status, await response.json()

    async with served(CoreEngine(folder, length=LIMIT)) as server:
        words = LIMIT // 3
        while (answer := await chat(server, words, 1))[0] == 200:
            assert answer[1]["usage"]["total_tokens"] <= LIMIT
            words += 1
        assert answer[1]["error"]["code"] == "context_length_exceeded"
        status, whole = await chat(server, words - 1, None)
    assert (status, whole["usage"]["total_tokens"], whole["choices"][0]["finish_reason"]) == (200, LIMIT, "length")


async def test_short_requests_start_before_a_long_prompt_is_computed(folder: Path) -> None:
    """The long one fills many steps; each short one waits for a few of them only."""
    engine = CoreEngine(folder, length=5000, budget=64, batch=16)
    async with served(engine) as server:
        long = asyncio.create_task(complete(server, 4000, 1))
        await engine.until(lambda engine: len(engine.requests) == 1)
        while engine.steps < 2:
            await asyncio.sleep(0)
        begun = engine.steps
        short = [asyncio.create_task(complete(server, 3 + number, 1)) for number in range(10)]
        await asyncio.gather(*short)
        assert engine.steps - begun < 30, "4000 tokens at half the budget take over a hundred"
        assert not long.done()
        assert (await long)[0] == 200
        *first, last = engine.computed.values()
    assert (len(first), last) == (10, 4000)


@pytest.mark.parametrize("policy", ["slo", "fcfs", "sjf"])
async def test_a_long_prompt_gets_through_a_steady_flow_of_short_ones(folder: Path, policy: str) -> None:
    """Eight clients send short requests without a pause; the long one is done before each has sent a hundred."""
    engine = CoreEngine(folder, length=2048, budget=64, batch=4)
    done = asyncio.Event()
    counts = [0] * 8

    async def flow(server: Served, place: int) -> None:
        while not done.is_set():
            assert (await complete(server, 4 + place, 2))[0] == 200
            counts[place] += 1
            assert counts[place] < 100, "the long prompt starves"

    async with served(engine) as server:
        clients = [asyncio.create_task(flow(server, place)) for place in range(len(counts))]
        status, _ = await complete(server, 1500, 1)
        done.set()
        await asyncio.gather(*clients)
    assert status == 200
    assert min(counts) > 0
