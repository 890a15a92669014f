"""The gateway on a real port, used by the official client, and ended as a cluster ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer

from paceline_server.errors import EngineLost, InvalidConfiguration, ModelUnsupported
from paceline_server.gateway.serve import serve_gateway
from paceline_server.testing import FakeEngine, server_config

TEXT = "The capital city of France is Paris 🚀."
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def engine(folder: Path) -> FakeEngine:
    return FakeEngine(folder, Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids)


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[tuple[str, asyncio.Task[bool]]]:
    """The base URL of a ready server and the task that serves it."""
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve_gateway(server_config(), engine, on_listening=listening.set_result))
    url = f"http://127.0.0.1:{await listening}"
    try:
        async with aiohttp.ClientSession() as client:
            while (await client.get(f"{url}/readyz")).status != 200:
                await asyncio.sleep(0.01)
        yield url, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_official_client_chats_and_completes_streamed_and_not(engine: FakeEngine) -> None:
    async with serving(engine) as (url, _), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chat = await client.chat.completions.create(model="tiny", messages=HI, max_completion_tokens=100)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (TEXT, "stop")
        assert chat.usage is not None
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        completion = await client.completions.create(model="tiny", prompt="Hi", max_tokens=2)
        assert completion.choices[0].finish_reason == "length"
        stream = await client.completions.create(model="tiny", prompt="Hi", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT
        assert [model.id for model in (await client.models.list()).data] == ["tiny", "ORG/tiny"]
        assert (await client.models.retrieve("ORG/tiny")).id == "ORG/tiny"


async def test_the_end_of_a_server_tells_whether_a_drain_was_asked_for(engine: FakeEngine) -> None:
    async with serving(engine) as (url, task), aiohttp.ClientSession() as client:
        await client.post(f"{url}/drain")
        assert await asyncio.wait_for(task, 60) is True
    async with serving(engine) as (_, task):
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, 60) is False


async def test_the_clients_own_accumulator_puts_a_stream_together(engine: FakeEngine) -> None:
    """Its helper fails on a role in every chunk, on a missing one, and on an empty finish reason."""
    async with serving(engine) as (url, _), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        options: Any = {"include_usage": True}
        async with client.chat.completions.stream(model="tiny", messages=HI, stream_options=options) as stream:
            final = await stream.get_final_completion()
    assert (final.choices[0].message.role, final.choices[0].message.content) == ("assistant", TEXT)
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None


async def test_the_client_raises_what_the_server_says(engine: FakeEngine) -> None:
    async with serving(engine) as (url, _), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
            await client.chat.completions.create(model="tiny", messages=HI, max_tokens=-1)
        assert (caught.value.param, caught.value.code) == ("max_tokens", "invalid_value")
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.chat.completions.create(model="gpt", messages=HI)
        engine.script = [66, EngineLost("the engine process died")]
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="the engine process died"):
            [chunk async for chunk in stream]


async def test_sigterm_finishes_what_runs_and_returns(engine: FakeEngine) -> None:
    gate = asyncio.Event()
    engine.script = [66, gate, 66]
    async with serving(engine) as (url, task), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.completions.create(model="tiny", prompt="Hi", stream=True)
        await anext(aiter(stream))
        os.kill(os.getpid(), signal.SIGTERM)
        refusing = client.with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await refusing.completions.create(model="tiny", prompt="Hi")
        assert not task.done()
        gate.set()
        rest = [chunk async for chunk in stream]
        assert rest[-1].choices[0].finish_reason == "stop"
        await asyncio.wait_for(task, 60)


async def test_a_second_signal_ends_what_still_runs(engine: FakeEngine) -> None:
    engine.script = [66, asyncio.Event()]
    async with serving(engine) as (url, task), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.completions.create(model="tiny", prompt="Hi", stream=True)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(openai.APIError, match="shuts down"):
            [chunk async for chunk in stream]
        await asyncio.wait_for(task, 60)
    assert len(engine.aborted) == 1


async def test_a_taken_port_is_a_mistake_in_the_configuration(engine: FakeEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfiguration, match=f"127.0.0.1:{port}"):
            await serve_gateway(server_config(port=port), engine)


async def test_a_model_without_a_usable_tokenizer_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="no tokenizer\\.json"):
        await asyncio.wait_for(serve_gateway(server_config(), FakeEngine(tmp_path)), 60)
