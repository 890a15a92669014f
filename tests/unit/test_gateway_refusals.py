"""What is refused: alike streamed and whole, in one shape, before the engine hears of it; the log says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai_calls import (
    CHAT,
    COMPLETION,
    answer_length,
    both_endpoints,
    post,
    speaking_engine,
)

from paceline_server.testing import FakeEngine, served, server_config


@pytest.fixture
def engine(folder: Path) -> FakeEngine:
    return speaking_engine(folder)


@both_endpoints
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_known_up_front_fails_alike_streamed_and_whole(
    engine: FakeEngine, path: str, body: dict[str, Any], streamed: bool
) -> None:
    """JSON under the right status, not one byte of a stream, and the engine hears nothing of it."""
    long = {"prompt": [5] * 257} if "prompt" in body else {"messages": [{"role": "user", "content": "x y " * 150}]}
    async with served(engine) as server:
        for fields, status, param, code in (
            (long, 400, next(iter(long)), "context_length_exceeded"),
            ({"max_tokens": 257}, 400, "max_tokens", "context_length_exceeded"),
            ({"max_tokens": 10**18}, 400, "max_tokens", "context_length_exceeded"),
            ({"max_tokens": -1}, 400, "max_tokens", "invalid_value"),
            ({"model": "other"}, 404, "model", "model_not_found"),
            ({"colour": "red"}, 400, "colour", "unknown_parameter"),
            ({"n": 17}, 400, "n", "invalid_value"),
            ({"deterministic": True}, 400, "deterministic", "unsupported_parameter"),
            ({"stop_token_ids": [400]}, 400, "stop_token_ids", "invalid_value"),
        ):
            got, answer = await post(server, path, body, stream=streamed, **fields)
            error = answer["error"]
            assert (got, error["param"], error["code"]) == (status, param, code)
            assert error["type"] == "invalid_request_error"
        assert engine.requests == []
        assert (await post(server, path, body))[0] == 200


async def test_the_refusal_of_a_long_prompt_has_the_limit_and_the_count(engine: FakeEngine) -> None:
    async with served(engine) as server:
        _, answer = await post(server, "/v1/completions", COMPLETION, prompt=[5] * 257)
    assert "maximum context length is 256 tokens" in answer["error"]["message"]
    assert "257 in the prompt" in answer["error"]["message"]


@both_endpoints
@pytest.mark.parametrize("batcher", ["dynamic", "static"])
async def test_a_prompt_longer_than_a_batch_by_request_is_refused_by_its_field_before_the_engine_hears_of_it(
    engine: FakeEngine, path: str, body: dict[str, Any], batcher: str
) -> None:
    config = server_config()
    batching = config.batching.model_copy(update={"batcher": batcher, "max_tokens_in_batch": 64})
    long = {"prompt": [5] * 65} if "prompt" in body else {"messages": [{"role": "user", "content": "x y " * 40}]}
    async with served(engine, config.model_copy(update={"batching": batching})) as server:
        status, answer = await post(server, path, body, **long)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, next(iter(long)), "context_length_exceeded")
        assert "holds 64 tokens (batching.max_tokens_in_batch)" in error["message"]
        assert engine.requests == []
        assert (await post(server, path, body))[0] == 200


async def test_a_prompt_longer_than_a_step_is_computed_in_chunks(engine: FakeEngine) -> None:
    config = server_config()
    batching = config.batching.model_copy(update={"max_tokens_in_batch": 64})
    async with served(engine, config.model_copy(update={"batching": batching})) as server:
        assert (await post(server, "/v1/completions", COMPLETION, prompt=[5] * 65))[0] == 200


@pytest.mark.parametrize("prompt", [[400], [5, 10**30], ""])
async def test_prompts_outside_the_vocabulary_or_without_tokens_are_refused(engine: FakeEngine, prompt: Any) -> None:
    async with served(engine) as server:
        status, answer = await post(server, "/v1/completions", COMPLETION, prompt=prompt)
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_unknown_paths_and_methods_answer_in_the_same_shape(engine: FakeEngine) -> None:
    async with served(engine) as server:
        for method, path, status in (("GET", "/v1/nope", 404), ("GET", "/v1/completions", 405), ("GET", "/drain", 405)):
            response = await server.client.request(method, path)
            assert response.status == status
            error = (await response.json())["error"]
            assert error["type"] == "invalid_request_error"
            assert error["code"] == {404: "unknown_url", 405: "method_not_allowed"}[status]


async def test_an_unknown_path_is_answered_with_what_is_served_and_a_wrong_method_with_the_right_one(
    engine: FakeEngine,
) -> None:
    async with served(engine) as server:
        response = await server.client.post("/chat/completions", json=CHAT)
        message = (await response.json())["error"]["message"]
        assert message.startswith("POST /chat/completions is not served here; served are: ")
        for route in ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models/{name}", "GET /readyz"):
            assert route in message
        assert "prefixes" not in message, "that is for other replicas"
        response = await server.client.get("/v1/chat/completions")
        assert (await response.json())["error"]["message"] == "/v1/chat/completions takes POST, not GET"
        assert response.headers["Allow"] == "POST"


async def test_the_access_log_says_why_a_request_was_refused(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with served(engine) as server:
        await post(server, "/v1/completions", COMPLETION, model="nobody")
        await server.client.get("/v1/nothing")
        await server.client.post("/drain")
        await post(server, "/v1/completions", COMPLETION)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "paceline.access"]
    assert [line.get("error") for line in lines] == ["model_not_found", "unknown_url", None, "draining"]


async def test_the_access_log_has_one_line_per_request_and_no_text(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    secret = "Zanzibar"
    async with served(engine) as server:
        await post(server, "/v1/completions", COMPLETION, prompt=secret)
        await post(server, "/v1/chat/completions", CHAT, messages=[{"role": secret, "content": secret}])
    lines = [json.loads(record.message) for record in caplog.records if record.name == "paceline.access"]
    assert [line["status"] for line in lines] == [200, 400]
    assert lines[0]["prompt_tokens"] == len(engine.requests[0].prompt_token_ids)
    assert lines[0]["completion_tokens"] == answer_length(engine) + 1
    assert 0 < lines[0]["ttft"] <= lines[0]["seconds"]
    assert (lines[0]["outcome"], lines[1]["outcome"]) == ("completed", "refused")
    assert ("error" in lines[0], lines[1]["error"]) == (False, "invalid_value")
    assert all(secret not in record.getMessage() for record in caplog.records)
    assert all("capital" not in record.getMessage() for record in caplog.records)
