"""The whole server, gateway and engine process, with a real model and real clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

pytestmark = pytest.mark.timeout(600)

LIMIT = 256
START_SECONDS = 300
PARIS: Any = [{"role": "user", "content": "Name the capital city of France."}]
EMOJI: Any = [{"role": "user", "content": "Repeat exactly: 🧑‍🚀 naïve 你好 🇳🇴"}]


@dataclass(frozen=True)
class RunningServer:
    """A server process that was ready once."""

    process: subprocess.Popen[bytes]
    url: str

    @property
    def client(self) -> openai.OpenAI:
        """The official client, without retries of its own."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON of a plain request."""
        data = json.dumps({"model": "smollm2", **body}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data=data)) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def ready(self) -> bool:
        """Whether /readyz says so."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz") as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def metric(self, name: str) -> float:
        """One sample of /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            lines = response.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).split()[1])

    def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Ask until `condition` holds; another process cannot be awaited."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, f"not within {seconds} s"
            time.sleep(0.1)

    def engine_pid(self) -> int:
        """The engine's process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes())


@contextmanager
def running(model: Path, folder: Path) -> Iterator[RunningServer]:
    """A ready server for `model`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = {
        "gateway": {"host": "127.0.0.1", "port": port, "drain_seconds": 300},
        "engine": {
            "model_path": str(model),
            "served_model_names": ["smollm2"],
            "max_model_len": LIMIT,
            "device": "cpu",
            "threads": 2,
        },
        "kv_cache": {"cpu_memory_gb": 0.25},
    }
    path = folder / "engine.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        "-c",
        "from paceline_server.cli import main; raise SystemExit(main())",
        "serve",
        "--config",
        str(path),
    ]
    process = subprocess.Popen(command)
    try:
        server = RunningServer(process, f"http://127.0.0.1:{port}")
        server.wait(server.ready, START_SECONDS)
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(smollm2_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(smollm2_model, tmp_path_factory.mktemp("server")) as started:
        yield started


def test_the_model_answers_the_same_streamed_and_whole(server: RunningServer) -> None:
    whole = server.client.chat.completions.create(model="smollm2", messages=PARIS, temperature=0, max_tokens=40)
    options: Any = {"include_usage": True}
    with server.client.chat.completions.stream(
        model="smollm2", messages=PARIS, temperature=0, max_tokens=40, stream_options=options
    ) as stream:
        streamed = stream.get_final_completion()
    assert "Paris" in (whole.choices[0].message.content or "")
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens


def test_characters_of_many_tokens_are_whole_at_every_length(server: RunningServer) -> None:
    for limit in range(1, 25, 5):
        fields: dict[str, Any] = {"model": "smollm2", "messages": EMOJI, "temperature": 0, "max_tokens": limit}
        whole = server.client.chat.completions.create(**fields).choices[0].message.content
        chunks = [
            chunk.choices[0].delta.content or ""
            for chunk in server.client.chat.completions.create(**fields, stream=True)
        ]
        assert "".join(chunks) == whole
        assert all("\ufffd" not in chunk for chunk in chunks[:-2])


@pytest.mark.parametrize("asked", [None, 1, 2, LIMIT])
@pytest.mark.parametrize("prompt", [LIMIT - 2, LIMIT - 1, LIMIT, LIMIT + 1, 10 * LIMIT])
def test_nothing_breaks_at_the_end_of_the_context(server: RunningServer, prompt: int, asked: int | None) -> None:
    status, answer = server.post(
        "/v1/completions", prompt=[504] * prompt, max_tokens=asked, ignore_eos=True, temperature=0
    )
    if prompt >= LIMIT:
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert f"{LIMIT} tokens" in answer["error"]["message"]
    else:
        assert status == 200
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == min(asked or LIMIT, LIMIT - prompt)


def test_a_stop_string_ends_the_answer(server: RunningServer) -> None:
    status, answer = server.post("/v1/completions", prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=60, stop=["9"])
    assert status == 200
    assert answer["choices"][0]["text"] == " 6, 7, 8, "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 60
    server.wait(lambda: server.metric("paceline_requests_running") == 0, 5)


def test_a_seed_gives_the_same_text_in_any_company(server: RunningServer) -> None:
    """Alone, beside unseeded and beside seeded requests; other seeds give other texts, and so does none."""

    def text(seed: int | None) -> str:
        status, answer = server.post(
            "/v1/completions", prompt="Once upon a time", temperature=1.0, max_tokens=12, ignore_eos=True, seed=seed
        )
        assert status == 200
        found: str = answer["choices"][0]["text"]
        return found

    alone = text(1234)
    with ThreadPoolExecutor(8) as pool:
        beside_unseeded = list(pool.map(text, [1234, None, None]))
        beside_seeded = list(pool.map(text, [1, 2, 3, 1234, 4, 5, 6, 7]))
    assert beside_unseeded[0] == beside_seeded[3] == alone
    assert len(set(beside_seeded)) == 8
    assert len({alone, *beside_unseeded}) == 3


def test_a_client_that_goes_away_frees_its_blocks(server: RunningServer) -> None:
    stream = server.client.completions.create(
        model="smollm2", prompt="Once", max_tokens=LIMIT - 10, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.metric("paceline_requests_running") == 1
    cancelled = server.metric("paceline_cancellations_total")
    stream.close()
    server.wait(lambda: server.metric("paceline_requests_running") == 0, 5)
    assert server.metric("paceline_kv_cache_usage_ratio") == 0
    server.wait(lambda: server.metric("paceline_cancellations_total") == cancelled + 1, 5)


def test_an_engine_killed_in_mid_stream_ends_it_with_an_error_and_comes_back(server: RunningServer) -> None:
    """Readiness is away meanwhile, and so are the gauges' counts."""
    stream = server.client.completions.create(
        model="smollm2", prompt="Once", max_tokens=LIMIT - 10, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(server.engine_pid(), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine process died"):
        list(stream)
    assert not server.ready()
    status, answer = server.post("/v1/chat/completions", messages=PARIS)
    assert (status, answer["error"]["type"]) == (503, "overloaded_error")
    assert server.metric("paceline_requests_running") == 0
    server.wait(server.ready, START_SECONDS)
    assert server.post("/v1/chat/completions", messages=PARIS, max_tokens=5)[0] == 200
    assert server.metric("paceline_engine_restarts_total") == 1


def test_sigterm_finishes_the_stream_refuses_others_and_exits_with_0(smollm2_model: Path, tmp_path: Path) -> None:
    with running(smollm2_model, tmp_path) as server:
        stream = server.client.completions.create(
            model="smollm2", prompt="Once", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: not server.ready(), 5)
        assert server.post("/v1/completions", prompt="x")[0] == 503
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert server.process.wait(timeout=60) == 0
