"""The answer to --prompt is whole, or an error: a stream that breaks off is never taken for a short answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from paceline_operator.local.errors import RequestFailed
from paceline_operator.local.prompt import Answer, ask, example

FIRST = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
TOKEN = {"choices": [{"delta": {"content": "Paris"}}]}
END = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 9}}


@asynccontextmanager
async def streaming(*frames: Any, done: bool = True) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server that answers with these frames; yields its URL and the bodies it was sent."""
    asked: list[Any] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json() | {"key": request.headers.get("Authorization")})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for frame in frames:
            await response.write(f"data: {json.dumps(frame)}\n\n".encode())
        if done:
            await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), asked


async def test_the_answer_comes_piece_by_piece_and_is_counted_by_the_server_s_own_tokens() -> None:
    pieces: list[str] = []
    async with streaming(FIRST, TOKEN, TOKEN, END, USAGE) as (url, asked):
        answer = await ask(url, "m", "Where?", pieces.append)
    assert pieces == ["Paris", "Paris"]
    assert answer.tokens == 9
    assert 0 < answer.ttft <= answer.seconds
    assert asked[0]["messages"] == [{"role": "user", "content": "Where?"}]
    assert (asked[0]["model"], asked[0]["stream"]) == ("m", True)


async def test_a_key_goes_into_the_header_and_nowhere_where_there_is_none() -> None:
    async with streaming(FIRST, TOKEN, END, USAGE) as (url, asked):
        await ask(url, "m", "Where?", lambda text: None, "sk-team-a-0123456789")
        await ask(url, "m", "Where?", lambda text: None)
    assert [body["key"] for body in asked] == ["Bearer sk-team-a-0123456789", None]


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ((TOKEN, {"error": {"message": "the engine died"}}), "broke off: the engine died"),
        ((TOKEN,), "without a finish_reason"),
        ((END,), "empty"),
    ],
)
async def test_an_answer_that_is_not_whole_is_an_error(frames: tuple[Any, ...], words: str) -> None:
    async with streaming(*frames) as (url, _):
        with pytest.raises(RequestFailed, match=words):
            await ask(url, "m", "x", lambda _: None)


async def test_a_stream_that_ends_without_an_end_is_an_error() -> None:
    async with streaming(TOKEN, done=False) as (url, _):
        with pytest.raises(RequestFailed, match="broke off"):
            await ask(url, "m", "x", lambda _: None)


async def test_a_refusal_is_told_in_the_server_s_words() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no model m"}}, status=404)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", refuse)
    async with TestServer(app) as server:
        with pytest.raises(RequestFailed, match="404: no model m"):
            await ask(str(server.make_url("")).rstrip("/"), "m", "x", lambda _: None)


def test_the_numbers_are_one_line_also_for_a_single_token() -> None:
    assert Answer(tokens=5, ttft=0.5, seconds=2.5).summary() == "TTFT 500 ms   2.0 tokens/s   5 tokens in 2.50 s"
    assert "one token" in Answer(tokens=1, ttft=0.5, seconds=0.5).summary()


async def test_the_example_is_a_chat_where_the_server_says_nothing_of_its_model() -> None:
    async with streaming() as (url, _):
        command = await example(url, "m")
    assert command.startswith(f"curl {url}/v1/chat/completions ")
    assert '"messages"' in command
    assert '"temperature": 0' in command, "the first answer of a small model should not look broken"
    assert "Authorization" not in command


async def test_the_example_never_shows_the_key() -> None:
    async with streaming() as (url, _):
        command = await example(url, "m", "sk-team-a-0123456789")
    assert "Bearer KEY" in command
    assert "0123456789" not in command
