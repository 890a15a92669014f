"""The servers under test: how each is installed, started, asked, and stopped.

Peers live in environments of their own under the cache folder, made on first use, so that nobody's pins touch ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import yaml

CACHE = Path(os.environ.get("PACELINE_CACHE", Path.home() / ".cache" / "paceline"))
_START_SECONDS = 300
_STOP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Server:
    """One server on one model.

    Attributes:
        command: starts it on 127.0.0.1 at `port`.
        ready_path: answers 200 when it can serve.
        body: fields that every request needs.
        environment: added to ours.
    """

    name: str
    command: tuple[str, ...]
    port: int
    ready_path: str
    body: dict[str, Any]
    version: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where completions are asked."""
        return f"http://127.0.0.1:{self.port}/v1/completions"


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers; `start_seconds` from its start to its first 200."""

    server: Server
    pid: int
    start_seconds: float


def paceline(model: Path, folder: Path, *, port: int = 18001, **engine: Any) -> Server:
    """Our server, configured for `model`; the configuration file goes to `folder`.

    Args:
        engine: keys of the file's engine group.
    """
    config = {
        "gateway": {"host": "127.0.0.1", "port": port},
        "engine": {"model_path": str(model), "served_model_names": ["m"], "device": "cpu", **engine},
        "kv_cache": {"cpu_memory_gb": 2.0},
    }
    path = folder / f"paceline-{port}.yaml"
    path.write_text(yaml.safe_dump(config))
    binary = Path(sys.executable).with_name("paceline-server")
    return Server(
        name=f"paceline {engine.get('quantization') or engine.get('dtype', 'float32')}",
        command=(str(binary), "serve", "--config", str(path)),
        port=port,
        ready_path="/readyz",
        body={"model": "m", "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}},
        version="0.1.0",
    )


def transformers_serve(model: Path, *, port: int = 18002, version: str = "5.24.0") -> Server:
    """`transformers serve --continuous-batching` in an environment of its own.

    It has no ignore_eos; a generation config with an end-of-sequence token that never comes does the same.
    """
    environment = _environment("transformers", f"transformers[serving]=={version}", "torch==2.15.0", "accelerate")
    binary = str(environment / "bin" / "transformers")
    options = "--continuous-batching --device cpu --dtype bfloat16 --attn-implementation sdpa"
    blocks = "--cb-num-blocks 64 --cb-max-batch-tokens 512"
    return Server(
        name="transformers serve",
        command=(binary, "serve", str(model), *f"{options} {blocks} --host 127.0.0.1 --port {port}".split()),
        port=port,
        ready_path="/health",
        body={
            "model": str(model),
            "generation_config": json.dumps({"eos_token_id": -1, "pad_token_id": 0, "do_sample": False}),
        },
        version=version,
        environment={"HF_HUB_OFFLINE": "1"},
    )


@contextmanager
def running(server: Server, log: Path) -> Iterator[Running]:
    """Start a server, wait until it is ready, and stop it with everything it started.

    Raises:
        RuntimeError: its port is taken, it ended, or it was not ready in time; the message names its log.
    """
    if _answers(server):
        raise RuntimeError(f"something answers on port {server.port} already; stop it, {server.name} is to run there")
    with log.open("ab") as output:
        begin = perf_counter()
        process = subprocess.Popen(
            server.command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **server.environment},
        )
        try:
            _wait(server, process, log)
            yield Running(server, process.pid, perf_counter() - begin)
        finally:
            _stop(process)


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = perf_counter() + _START_SECONDS
    while perf_counter() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{server.name} ended with exit code {process.returncode}; see {log}")
        if _answers(server):
            return
        sleep(0.05)
    raise RuntimeError(f"{server.name} was not ready after {_START_SECONDS} s; see {log}")


def _answers(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{server.ready_path}", timeout=2):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(name: str, *packages: str) -> Path:
    """A virtual environment with exactly these packages, made once."""
    folder = CACHE / "bench" / name
    stamp = folder / ".packages"
    if stamp.exists() and stamp.read_text() == " ".join(packages):
        return folder
    print(f"installing {' '.join(packages)} …", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([str(uv), "pip", "install", "--python", str(folder / "bin" / "python"), *packages], check=True)
    stamp.write_text(" ".join(packages))
    return folder
