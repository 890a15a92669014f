"""Runs in sentence-transformers' own environment: POST /v1/embeddings over `SentenceTransformer.encode`.

    python sentence_server.py MODEL PORT THREADS

The plain way: the handler gives the request's texts to `encode` on the one thread that owns the model, so that requests
take turns and each has all cores. (Calls side by side fight for the cores and come out slower.) HTTP, JSON and base64
are done by the same libraries as in our gateway, so that the difference is not theirs. What it lacks is what is
measured: batches across requests, and packing in place of padding.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from aiohttp import web
from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]  # in its own environment


def handlers(model: Any) -> tuple[Callable[[web.Request], Awaitable[web.Response]], ...]:
    """Readiness and embeddings."""
    turn = ThreadPoolExecutor(1)

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"ready": True})

    async def embed(request: web.Request) -> web.Response:
        body = await request.json()
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        loop = asyncio.get_running_loop()
        vectors = await loop.run_in_executor(turn, lambda: model.encode(texts, show_progress_bar=False))
        data = [
            {"object": "embedding", "index": index, "embedding": base64.b64encode(vector.tobytes()).decode()}
            for index, vector in enumerate(vectors)
        ]
        return web.json_response({"object": "list", "data": data, "model": body["model"]})

    return ready, embed


def main() -> None:
    """Serve until terminated."""
    folder, port, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = SentenceTransformer(folder, device="cpu")
    model.encode(["warm-up"])
    ready, embed = handlers(model)
    app = web.Application(client_max_size=0)
    app.add_routes([web.get("/readyz", ready), web.post("/v1/embeddings", embed)])
    web.run_app(app, host="127.0.0.1", port=int(port), access_log=None, print=None)


if __name__ == "__main__":
    main()
