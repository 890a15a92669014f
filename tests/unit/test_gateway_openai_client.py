"""What the official client makes of keys, limits and deadlines: its own errors, and no repetition that helps nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline_server.config import parse
from paceline_server.engine.interface import FinishReason
from paceline_server.keys import hash_key
from paceline_server.testing import FakeEngine, Served, served

KEY = "sk-team-a-0123456789"
A = 66
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def calling(
    engine: FakeEngine, key: str = KEY, **tenant: Any
) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    """A server with one tenant, and a client that repeats what it thinks is worth it, once."""
    config = parse({
        "gateway": {"host": "127.0.0.1", "port": 0},
        "engine": {"model_path": "/models/tiny", "served_model_names": ("tiny",)},
        "tenants": [{"name": "team-a", "key_hashes": [hash_key(KEY)], **tenant}],
    })  # fmt: skip
    async with (
        served(engine, config) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=1) as client,
    ):
        yield server, client


def requests_to(server: Served) -> float:
    """Requests that came, repetitions too."""
    return sum(value for name, value in server.scrape().items() if name.startswith("paceline_requests_total"))


async def test_a_wrong_key_is_an_authentication_error(folder: Path) -> None:
    async with calling(FakeEngine(folder, [A]), key="sk-wrong-0123456789") as (server, client):
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert caught.value.code == "invalid_api_key"
        assert requests_to(server) == 1


async def test_without_a_key_the_client_can_be_the_anonymous_tenant(folder: Path) -> None:
    async with calling(FakeEngine(folder, [A]), key="none", anonymous=True) as (_, client):
        assert (await client.chat.completions.create(model="tiny", messages=MESSAGES)).choices


async def test_a_tier_that_may_not_be_used_is_a_permission_error(folder: Path) -> None:
    async with calling(FakeEngine(folder, [A]), tiers=["standard"]) as (_, client):
        with pytest.raises(openai.PermissionDeniedError, match="may not use the tier interactive"):
            await client.chat.completions.create(model="tiny", messages=MESSAGES, service_tier="priority")
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, service_tier="auto")
        assert answer.service_tier == "default"


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"daily_tokens": 20}, "insufficient_quota"), ({"tokens_per_minute": 20}, "rate_limit_exceeded")],
    ids=["day", "too-large"],
)
async def test_what_waiting_does_not_help_is_a_rate_limit_error_that_is_not_repeated(
    folder: Path, limits: dict[str, int], code: str
) -> None:
    async with calling(FakeEngine(folder, [A]), **limits) as (server, client):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=100)
        assert caught.value.code == code
        assert requests_to(server) == 1


async def test_a_request_that_expired_in_line_is_not_repeated(folder: Path) -> None:
    async with calling(FakeEngine(folder, [FinishReason.TIMEOUT])) as (server, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"timeout": 1})
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        assert requests_to(server) == 1


async def test_an_answer_that_ran_out_of_time_is_read_as_one_that_was_cut(folder: Path) -> None:
    prices = {"input_per_million": 1.0, "output_per_million": 1.0}
    async with calling(FakeEngine(folder, [A, A, FinishReason.TIMEOUT]), prices=prices) as (_, client):
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Request-Timeout": "5"},
        )
        chunks = [chunk async for chunk in stream]
    last, usage = chunks[-2].choices[0], chunks[-1].usage
    assert last.finish_reason == "length"
    assert last.model_extra == {"incomplete_details": {"reason": "deadline_exceeded"}}
    assert usage is not None
    assert usage.model_extra is not None
    assert usage.model_extra["paceline"]["cost"]["total"] > 0
