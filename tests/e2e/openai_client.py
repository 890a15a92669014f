"""The user of the end-to-end tests: the official openai client, run as a program where the Service can be reached.

Reads {"url": …, "key": …, "requests": […]} from standard input, sends all requests at once, prints one answer each as
JSON: {"text", "finish_reason", "tokens", "pieces", "seconds", "error"}; `seconds` are those from the first piece to the
last, `error` is null for an answer that came whole.
Run by `LiveService.ask` and `LiveService.asking`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from openai import AsyncOpenAI, OpenAIError

Answer = dict[str, Any]


async def main() -> None:
    """Answer on standard output; the exit code is 0 whatever the server said."""
    order = json.load(sys.stdin)
    async with AsyncOpenAI(base_url=f"{order['url']}/v1", api_key=order["key"], max_retries=0, timeout=600) as client:
        answers = await asyncio.gather(*(ask(client, request) for request in order["requests"]))
    json.dump(answers, sys.stdout)


async def ask(client: AsyncOpenAI, request: dict[str, Any]) -> Answer:
    """Send one chat request, streamed or not, as `request["stream"]` says."""
    answer: Answer = {"text": "", "finish_reason": None, "tokens": None, "pieces": 0, "seconds": 0.0, "error": None}
    try:
        await (streamed if request.get("stream") else whole)(client, request, answer)
    except OpenAIError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


async def whole(client: AsyncOpenAI, request: dict[str, Any], answer: Answer) -> None:
    """Fill in the answer to a request that is not streamed."""
    completion = await client.chat.completions.create(**request)
    (choice,) = completion.choices
    answer |= {"text": choice.message.content, "finish_reason": choice.finish_reason, "pieces": 1}
    answer["tokens"] = completion.usage.completion_tokens


async def streamed(client: AsyncOpenAI, request: dict[str, Any], answer: Answer) -> None:
    """Fill in the answer piece by piece."""
    first = None
    async for chunk in await client.chat.completions.create(**request, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            if choice.delta.content:
                answer["text"] += choice.delta.content
                answer["pieces"] += 1
                first = first or time.monotonic()
                answer["seconds"] = time.monotonic() - first
            answer["finish_reason"] = choice.finish_reason or answer["finish_reason"]
        if chunk.usage:
            answer["tokens"] = chunk.usage.completion_tokens


if __name__ == "__main__":
    asyncio.run(main())
