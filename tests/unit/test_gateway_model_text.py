"""The tokenizer and the template follow the engine's model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline_server.gateway import model_text
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
        await asyncio.wait_for(server.gateway.texts.loaded.wait(), 10)
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
