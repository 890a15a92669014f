"""One chat request over the public API, its answer streamed to the terminal, and how fast it came; and what to ask.

For `paceline up`, with and without `--prompt`. An answer that ends early is an error here, never a short answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from paceline_operator.local.errors import RequestFailed

_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 300.0  # between two tokens, on the slowest of machines
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request went: tokens of output, seconds to the first one and to the last one."""

    tokens: int
    ttft: float
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Output speed after the first token; None for a single token."""
        generating = self.seconds - self.ttft
        return (self.tokens - 1) / generating if self.tokens > 1 and generating > 0 else None

    def summary(self) -> str:
        """The numbers in one line."""
        rate = self.tokens_per_second
        speed = f"{rate:.1f} tokens/s" if rate is not None else "one token"
        return f"TTFT {self.ttft * 1000:.0f} ms   {speed}   {self.tokens} tokens in {self.seconds:.2f} s"


async def ask(url: str, model: str, prompt: str, say: Callable[[str], None], key: str | None = None) -> Answer:
    """Ask, and hand each piece of the answer to `say` as it comes.

    Args:
        key: of a tenant, where the service has some.

    Raises:
        RequestFailed: the request was refused, the stream carried an error, or it ended without an end.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {key}"} if key else None
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            started = time.monotonic()
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                if response.status != 200:
                    raise RequestFailed(f"{response.status}: {_error_text(await response.text())}")
                return await _read(response, started, say)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RequestFailed(f"the connection broke: {error or type(error).__name__}") from None


async def example(url: str, model: str, key: str | None = None) -> str:
    """A curl command that the served model answers: a chat, or texts to embed.

    Args:
        key: of a tenant, where the service has some; the command has a word in its place.
    """
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
    path = "/v1/chat/completions"
    if await _embeds(url, key):
        path, asked = "/v1/embeddings", {"input": ["Hello!"]}
    headers = ["Content-Type: application/json", *(["Authorization: Bearer KEY"] if key else [])]
    options = " ".join(f"-H '{header}'" for header in headers)
    return f"curl {url}{path} {options} -d '{json.dumps({'model': model} | asked)}'"


async def _embeds(url: str, key: str | None) -> bool:
    """Whether the server says that its model embeds; one that says nothing generates."""
    headers = {"Authorization": f"Bearer {key}"} if key else None
    timeout = aiohttp.ClientTimeout(total=_CONNECT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/v1/models", headers=headers) as response,
        ):
            models = (await response.json())["data"]
        return any(model.get("task") == "embed" for model in models)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
        return False


async def _read(response: aiohttp.ClientResponse, started: float, say: Callable[[str], None]) -> Answer:
    first = last = None
    pieces, tokens, finished = 0, None, False
    async for frame in _frames(response):
        if "error" in frame:
            raise RequestFailed(f"the answer broke off: {frame['error'].get('message', 'no reason given')}")
        if usage := frame.get("usage"):
            tokens = int(usage["completion_tokens"])
        for choice in frame.get("choices", ()):
            finished = finished or choice.get("finish_reason") is not None
            if text := choice.get("delta", {}).get("content"):
                last = time.monotonic()
                first = first or last
                pieces += 1
                say(text)
    if not finished:
        raise RequestFailed("the answer broke off: the stream ended without a finish_reason")
    if first is None or last is None:
        raise RequestFailed("the answer is empty")
    return Answer(tokens or pieces, first - started, last - started)


async def _frames(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]."""
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if data and line.startswith(b"data:"):
            yield json.loads(data)


def _error_text(body: str) -> str:
    """The message of OpenAI's error object, or the body as it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500]
