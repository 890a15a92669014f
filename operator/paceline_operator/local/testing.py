"""A server for tests that keeps the contract of paceline-server without a model, and manifests that run it.

`python -m paceline_operator.local.testing serve --config FILE` is the fake; `fake_service` is an LLMService whose pods
run it by an overlay. The fake is steered by its environment, which the overlay sets:

    FAKE_PHASE_SECONDS   how long each start-up phase takes
    FAKE_TOKEN_SECONDS   how long each token of an answer takes
    FAKE_TOKENS          how many tokens an answer has
    FAKE_FAILURE         the last words of a server that fails before it is ready, `Reason: message`

A model of the name `missing` does not exist. POST /fake/hang makes the fake stop answering its probes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from paceline_operator import names
from paceline_operator.cluster import Manifest

PHASES = ("start_engine", "load_weights", "allocate_kv_cache", "warmup")
WORDS = ("The ", "capital ", "of ", "France ", "is ", "Paris.")


def fake_service(name: str = "fake", environment: dict[str, str] | None = None, **spec: Any) -> Manifest:
    """An LLMService that runs the fake. Keyword arguments are fields of its spec."""
    settings = {"FAKE_PHASE_SECONDS": "0.02", "FAKE_TOKEN_SECONDS": "0.01", "FAKE_TOKENS": str(len(WORDS))} | (
        environment or {}
    )
    server = {
        "name": names.CONTAINER,
        "command": [sys.executable, "-m", "paceline_operator.local.testing"],
        "env": [{"name": key, "value": value} for key, value in settings.items()],
        "startupProbe": {"periodSeconds": 0.05},  # a cluster knows whole seconds only; tests are in a hurry
        "readinessProbe": {"periodSeconds": 0.05},
    }
    defaults = {"model": "hf://fake/Model", "resources": {}, "replicas": 1, "drainSeconds": 5}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {**defaults, "template": {"spec": {"containers": [server]}}, **spec},
    }


class FakeServer:
    """The state of the fake: how far it has started, what runs, whether it drains or hangs."""

    def __init__(self) -> None:
        self.phases: list[dict[str, Any]] = []
        self.ready = False
        self.draining = False
        self.hanging = False
        self.running = 0
        self.served = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def app(self) -> web.Application:
        """The HTTP side of the contract."""
        app = web.Application()
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/fake/hang", self._hang)
        return app

    async def start(self, phase_seconds: float) -> None:
        """Go through the phases."""
        for name in PHASES:
            phase: dict[str, Any] = {"name": name, "seconds": None}
            self.phases.append(phase)
            await asyncio.sleep(phase_seconds)
            phase["seconds"] = phase_seconds
        self.ready = True

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self.ready and not self.draining
        reason = "Draining" if self.draining else "Ready" if ready else "Loading"
        phase = self.phases[-1]["name"] if self.phases else PHASES[0]
        body = {"ready": ready, "phase": phase, "phases": self.phases, "reason": reason, "message": reason}
        return web.json_response(body, status=200 if ready else 503)

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.hanging else 200)

    async def _hang(self, _: web.Request) -> web.Response:
        self.hanging = True
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [
            "# TYPE paceline_requests_waiting gauge",
            "paceline_requests_waiting 0",
            "# TYPE paceline_requests_running gauge",
            f"paceline_requests_running {self.running}",
            "# TYPE paceline_ttft_seconds histogram",
            f'paceline_ttft_seconds_bucket{{le="0.1"}} {self.served}',
            f'paceline_ttft_seconds_bucket{{le="+Inf"}} {self.served}',
            f"paceline_ttft_seconds_sum {self.served * 0.05}",
            f"paceline_ttft_seconds_count {self.served}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if self.draining:
            error = {"message": "draining", "type": "overloaded_error", "param": None, "code": None}
            return web.json_response({"error": error}, status=503, headers={"Retry-After": "1"})
        body = await request.json()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.running += 1
        self.idle.clear()
        try:
            await self._stream(answer, min(int(body["max_tokens"]), int(os.environ["FAKE_TOKENS"])))
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()
        return answer

    async def _stream(self, answer: web.StreamResponse, tokens: int) -> None:
        for index in range(tokens):
            await asyncio.sleep(float(os.environ["FAKE_TOKEN_SECONDS"]))
            if index == 0:
                self.served += 1
            await _send(answer, {"choices": [{"index": 0, "delta": {"content": WORDS[index % len(WORDS)]}}]})
        await _send(answer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await _send(answer, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
        await answer.write(b"data: [DONE]\n\n")


async def _send(answer: web.StreamResponse, frame: dict[str, Any]) -> None:
    await answer.write(f"data: {json.dumps(frame)}\n\n".encode())


def _fail(words: str) -> int:
    print(words, file=sys.stderr)
    log = Path(os.environ["PACELINE_TERMINATION_LOG"])
    if log.exists():
        log.write_text(words, encoding="utf-8")
    return 1


async def _serve(host: str, port: int) -> None:
    server, drain = FakeServer(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain.set)
    runner = web.AppRunner(server.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    starting = asyncio.create_task(server.start(float(os.environ["FAKE_PHASE_SECONDS"])))
    await drain.wait()
    server.draining = True
    await server.idle.wait()
    starting.cancel()
    await runner.cleanup()


def main() -> int:
    """Serve as paceline-server does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    model = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))["engine"]["model_path"]
    if model.endswith("/missing"):
        return _fail(f"ModelNotFound: {model} is neither in the model store nor on the hub (404)")
    if failure := os.environ.get("FAKE_FAILURE"):
        return _fail(failure)
    asyncio.run(_serve(arguments.host, arguments.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
