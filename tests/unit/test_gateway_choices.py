"""Several answers to one request (`n`): choices with an index, each whole by itself, one end for all."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from paceline_server.testing import END_OF_TURN, FakeEngine, Served, served, write_model

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
both_endpoints = pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)],
    ids=["chat", "completions"],
)


@pytest.fixture
def engine(folder: Path) -> FakeEngine:
    tokens = write_model(folder).encode("one two three four").ids
    return FakeEngine(folder, tokens)


def text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content", ""))


async def stream(server: Served, path: str, body: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    async with server.client.post(path, json={**body, "stream": True, **fields}) as response:
        *frames, done, rest = (await response.read()).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


@both_endpoints
async def test_a_whole_answer_has_n_choices_in_order_and_counts_the_prompt_once(
    engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    async with served(engine) as server:
        one = await (await server.client.post(path, json=body)).json()
        answer = await (await server.client.post(path, json={**body, "n": 3})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {text(choice) for choice in answer["choices"]} == {text(one["choices"][0])}
    assert answer["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert engine.requests[-1].n == 3
    assert engine.aborted == []


@both_endpoints
async def test_a_stream_carries_each_choice_whole_with_one_reason_and_one_usage(
    engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    async with served(engine) as server:
        whole = await (await server.client.post(path, json={**body, "n": 3})).json()
        *chunks, usage = await stream(server, path, body, n=3, stream_options={"include_usage": True})
    choices = defaultdict(list)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        choices[choice["index"]].append(choice)
    assert set(choices) == {0, 1, 2}
    for index, parts in choices.items():
        assert "".join(map(text, parts)) == text(whole["choices"][index])
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        roles = [part["delta"]["role"] for part in parts if "role" in part.get("delta", {})]
        assert roles == (["assistant"] if path.startswith("/v1/chat") else [])
    assert usage["usage"] == whole["usage"]


async def test_a_stop_string_ends_one_answer_and_the_others_go_on(folder: Path) -> None:
    """The first answer meets the stop string; it alone is cut in the engine."""
    tokenizer = write_model(folder)
    stop, other = tokenizer.encode("x").ids, tokenizer.encode("y").ids
    assert len(stop) == len(other) == 1
    gate = asyncio.Event()

    class TwoAnswers(FakeEngine):
        async def _outputs(self, request: Any, finished: Any) -> Any:
            async for output in super()._outputs(request, finished):
                mark = stop[0] if output.index == 0 else other[0]
                tokens = [mark if token == other[0] else token for token in output.token_ids]
                yield type(output)(output.request_id, tokens, output.finish, 0, 0.0, output.index)

    engine = TwoAnswers(folder, [other[0], gate, other[0], other[0]])
    async with served(engine) as server:
        body = {**COMPLETION, "n": 2, "stop": "x"}
        answer = asyncio.create_task(server.client.post("/v1/completions", json=body))
        await engine.until(lambda fake: bool(fake.cuts))
        gate.set()
        choices = (await (await answer).json())["choices"]
    assert engine.cuts == [(engine.requests[0].request_id, 0)]
    assert [text(choice) for choice in choices] == ["", "yyy"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]


@both_endpoints
async def test_a_client_that_goes_away_ends_all_answers(folder: Path, path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(folder, [5, asyncio.Event()])
    async with served(engine) as server:
        response = await server.client.post(path, json={**body, "stream": True, "n": 4})
        await response.content.readline()
        response.close()
        await engine.until(lambda fake: not fake.running)
    assert engine.aborted == [engine.requests[0].request_id]


async def test_more_answers_than_configured_are_refused_before_anything_is_done(engine: FakeEngine) -> None:
    async with served(engine, max_n=2) as server:
        for streamed in (False, True):
            response = await server.client.post("/v1/completions", json={**COMPLETION, "n": 3, "stream": streamed})
            error = (await response.json())["error"]
            assert (response.status, error["param"], error["code"]) == (400, "n", "invalid_value")
            assert "gateway.max_n" in error["message"]
        assert (await server.client.post("/v1/completions", json={**COMPLETION, "n": 2})).status == 200
    assert len(engine.requests) == 1
    assert END_OF_TURN not in engine.requests[0].prompt_token_ids
