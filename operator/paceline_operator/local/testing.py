"""A server for tests that keeps the contract of paceline-server without a model, and manifests that run it.

`python -m paceline_operator.local.testing serve --config FILE` is the fake; `fake_service` is an LLMService whose pods
run it by an overlay. The fake is steered by its environment, which the overlay sets:

    FAKE_PHASE_SECONDS   how long each start-up phase takes
    FAKE_TOKEN_SECONDS   how long each token of an answer takes
    FAKE_TOKENS          how many tokens an answer has
    FAKE_FAILURE         the last words of a server that fails before it is ready, `Reason: message`
    FAKE_EXIT_CODE       its exit code then; 1 when absent
    FAKE_FAILURE_FILE    it fails only while there is a file of this name in the home folder

A model of the name `missing` does not exist. POST /fake/hang makes the fake stop answering its probes, and
POST /fake/crash ends it. Its HTTP is the
little that our clients need, by hand: it starts in a tenth of a second, and tests start it dozens of times.
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

from paceline_operator import names
from paceline_operator.cluster import Manifest

PHASES = ("start_engine", "load_weights", "allocate_kv_cache", "warmup")
_CRASHED = 9
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
        self.told_to_end = asyncio.Event()
        self._phases: list[dict[str, Any]] = []
        self._ready = False
        self._draining = False
        self._hanging = False
        self._served = 0
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, phase_seconds: float) -> None:
        """Go through the phases."""
        for name in PHASES:
            phase: dict[str, Any] = {"name": name, "seconds": None}
            self._phases.append(phase)
            await asyncio.sleep(phase_seconds)
            phase["seconds"] = phase_seconds
        self._ready = True

    async def drain(self) -> None:
        """Refuse what comes and wait for the end of what runs."""
        self._draining = True
        await self._idle.wait()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        lengths = [line.split(":")[1] for line in head.lower().splitlines() if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        if path == "/v1/chat/completions" and not self._draining:
            await self._chat(writer, json.loads(body))
        else:
            status, text = self._reply(path)
            writer.write(
                _head(status, "Content-Type: application/json", f"Content-Length: {len(text)}") + text.encode()
            )
        await writer.drain()
        writer.close()

    def _reply(self, path: str) -> tuple[int, str]:
        match path:
            case "/readyz":
                ready = self._ready and not self._draining
                reason = "Draining" if self._draining else "Ready" if ready else "Loading"
                return (200 if ready else 503), json.dumps({"ready": ready, "phases": self._phases, "reason": reason})
            case "/healthz":
                return (503 if self._hanging else 200), ""
            case "/metrics":
                return 200, self._metrics()
            case "/fake/hang":
                self._hanging = True
                return 200, ""
            case "/drain":
                _leave_word("Drained: it was asked to")
                self._draining = True
                self.told_to_end.set()
                return 202, ""
            case "/fake/crash":
                os._exit(_CRASHED)
        return 503, json.dumps({"error": {"message": "draining"}})

    def _metrics(self) -> str:
        return (
            "# TYPE paceline_requests_waiting gauge\n"
            "paceline_requests_waiting 0\n"
            "# TYPE paceline_requests_running gauge\n"
            f"paceline_requests_running {self._running}\n"
            "# TYPE paceline_ttft_seconds histogram\n"
            f'paceline_ttft_seconds_bucket{{le="0.1"}} {self._served}\n'
            f'paceline_ttft_seconds_bucket{{le="+Inf"}} {self._served}\n'
            f"paceline_ttft_seconds_sum {self._served * 0.05}\n"
            f"paceline_ttft_seconds_count {self._served}\n"
        )

    async def _chat(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self._running += 1
        self._idle.clear()
        try:
            writer.write(_head(200, "Content-Type: text/event-stream"))
            tokens = min(int(body["max_tokens"]), int(os.environ["FAKE_TOKENS"]))
            for index in range(tokens):
                await asyncio.sleep(float(os.environ["FAKE_TOKEN_SECONDS"]))
                self._served += index == 0
                await _send(writer, {"choices": [{"index": 0, "delta": {"content": WORDS[index % len(WORDS)]}}]})
            await _send(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            await _send(writer, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
            writer.write(b"data: [DONE]\n\n")
            await writer.drain()
        except ConnectionError:
            pass  # the caller is gone
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


def _head(status: int, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} .", *headers, "Connection: close", "", ""]).encode()


async def _send(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    writer.write(f"data: {json.dumps(frame)}\n\n".encode())
    await writer.drain()


def _fail(words: str, code: int) -> int:
    print(words, file=sys.stderr)
    _leave_word(words)
    return code


def _leave_word(words: str) -> None:
    log = Path(os.environ["PACELINE_TERMINATION_LOG"])
    if log.exists():
        log.write_text(words, encoding="utf-8")


async def _serve(host: str, port: int) -> None:
    server = FakeServer()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.told_to_end.set)
    async with await asyncio.start_server(server.answer, host, port):
        starting = asyncio.create_task(server.start(float(os.environ["FAKE_PHASE_SECONDS"])))
        await server.told_to_end.wait()
        await server.drain()
        starting.cancel()


def main() -> int:
    """Serve as paceline-server does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    lines = arguments.config.read_text(encoding="utf-8").splitlines()
    (model,) = (line.split(": ")[1] for line in lines if line.strip().startswith("model_path: "))
    if model.endswith("/missing"):
        return _fail(f"ModelNotFound: {model} is neither in the model store nor on the hub (404)", names.EXIT_CONFIG)
    while_file = os.environ.get("FAKE_FAILURE_FILE")
    if (failure := os.environ.get("FAKE_FAILURE")) and (while_file is None or (Path.home() / while_file).exists()):
        return _fail(failure, int(os.environ.get("FAKE_EXIT_CODE", "1")))
    asyncio.run(_serve(arguments.host, arguments.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
