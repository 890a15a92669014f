"""Calls of the OpenAI endpoints, read as bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline_server.testing import FakeEngine, Served

TEXT = "The capital city 🧑‍🚀 naïve 你好 🇳🇴 e\u0301 is Paris."
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
ENDPOINTS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
both_endpoints = pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["chat", "completions"])


def speaking_engine(folder: Path) -> FakeEngine:
    """An engine that answers `TEXT` to everything, with the tokenizer of `testing.write_model`."""
    return FakeEngine(folder, Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids)


def answer_length(engine: FakeEngine) -> int:
    """Tokens of the text that the engine answers, without the one that ends it."""
    assert not callable(engine.script)
    return len(engine.script)


async def post(server: Served, path: str, body: dict[str, Any], **fields: Any) -> tuple[int, Any]:
    """Status and JSON of a whole answer."""
    async with server.client.post(path, json={**body, **fields}) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


async def stream(server: Served, path: str, body: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well, checked frame by frame as bytes."""
    async with server.client.post(path, json={**body, "stream": True, **fields}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        *frames, done, rest = (await response.read()).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(frame.removeprefix(b"data: ").decode("utf-8")) for frame in frames]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def whole_text(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text
