"""The tokenizer and the template follow the engine's model."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline_server.errors import ModelUnsupported
from paceline_server.gateway import model_text
from paceline_server.gateway.model_text import TextKeeper
from paceline_server.testing import FakeEngine, served, write_model

A = 66


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, None)
    return path


async def test_a_restarted_engine_may_hold_another_context(folder: Path) -> None:
    """The limits are those of the engine that runs now; the tokenizer is not loaded again for it."""
    engine = FakeEngine(folder, [A])
    async with served(engine) as server:
        before = server.gateway.require_text()
        body = {"model": "tiny", "prompt": [5] * 100}
        assert (await server.client.post("/v1/completions", json=body)).status == 200
        engine.max_model_len = 100
        assert (await server.client.post("/v1/completions", json=body)).status == 400
        assert server.gateway.require_text().tokenizer is before.tokenizer


async def test_another_folder_is_loaded_in_place_of_the_old_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_text, "_RECHECK_SECONDS", 0.01)
    write_model(tmp_path)
    engine = FakeEngine(folder, [A])
    async with served(engine) as server:
        assert server.gateway.require_text().renderer is None
        server.gateway.texts.loaded.clear()
        engine.folder = tmp_path
        await asyncio.wait_for(server.gateway.texts.loaded.wait(), 60)
        assert server.gateway.require_text().renderer is not None


async def test_a_template_that_fails_on_a_greeting_is_in_the_log_and_completions_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "{% if")
    async with served(FakeEngine(tmp_path, [A])) as server:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
        assert (await server.client.post("/v1/chat/completions", json=chat)).status == 400
        assert (await server.client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"})).status == 200
    assert "chat template failed" in caplog.text


def add_token(folder: Path, content: str, token_id: int) -> None:
    """Write one more special token into the tokenizer of a folder."""
    file = folder / "tokenizer.json"
    definition = json.loads(file.read_text())
    definition["added_tokens"].append({**definition["added_tokens"][0], "content": content, "id": token_id})
    file.write_text(json.dumps(definition))


async def test_a_tokenizer_that_is_not_the_models_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    write_model(tmp_path)
    add_token(tmp_path, "<far>", 2**27)
    with ThreadPoolExecutor(1) as workers, pytest.raises(ModelUnsupported, match=r"the model has 400 tokens"):
        await asyncio.wait_for(TextKeeper(FakeEngine(tmp_path), workers, helpers=1).run(), 60)


async def test_a_token_that_the_model_does_not_know_is_refused_before_the_engine_sees_it(tmp_path: Path) -> None:
    """A padding token that was added behind a vocabulary: written in a prompt, or by a template."""
    tokens = write_model(tmp_path, "<pad>{{ messages[0].content }}").get_vocab_size()
    add_token(tmp_path, "<pad>", tokens)
    engine = FakeEngine(tmp_path, [A])
    engine.vocab_size = tokens
    async with served(engine) as server:
        for path, body, param in (
            ("completions", {"prompt": "Hi<pad>"}, "prompt"),
            ("completions", {"prompt": [tokens]}, "prompt"),
            ("completions", {"prompt": "Hi", "stop_token_ids": [tokens]}, "stop_token_ids"),
            ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ):
            response = await server.client.post(f"/v1/{path}", json={"model": "tiny", **body})
            error = (await response.json())["error"]
            assert (response.status, error["param"], error["code"]) == (400, param, "invalid_value")
            assert f"not to {tokens}" in error["message"]
        assert (await server.client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"})).status == 200
    assert len(engine.requests) == 1


async def test_an_empty_prompt_and_a_chat_without_a_template_have_the_code_of_other_bad_values(folder: Path) -> None:
    async with served(FakeEngine(folder, [A])) as server:
        for path, body, param in (
            ("completions", {"prompt": ""}, "prompt"),
            ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ):
            response = await server.client.post(f"/v1/{path}", json={"model": "tiny", **body})
            error = (await response.json())["error"]
            assert (response.status, error["param"], error["code"]) == (400, param, "invalid_value")
