"""The servers under test: how each is started, asked, and stopped. How the peers are installed is in `peers/`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Protocol

import yaml

from benchmarks.load import Record, closed_loop, mismatch, open_loop
from benchmarks.workloads import Request

_START_SECONDS = 400
_STOP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Server:
    """One server on one model, asked over HTTP.

    Attributes:
        command: starts it on 127.0.0.1 at `port`.
        ready_path: answers 200 when it can serve.
        body: fields that every request needs.
        environment: added to ours.
        keep_alive: whether it leaves connections open between requests.
    """

    name: str
    command: tuple[str, ...]
    port: int
    ready_path: str
    body: dict[str, Any]
    version: str
    environment: dict[str, str] = field(default_factory=dict)
    keep_alive: bool = True

    @property
    def url(self) -> str:
        """Where completions are asked."""
        return f"http://127.0.0.1:{self.port}/v1/completions"


@dataclass(frozen=True, slots=True)
class Driver:
    """An engine without a server: a process that says it is ready on stdout, then runs requests that it reads."""

    name: str
    command: tuple[str, ...]
    version: str


class Running(Protocol):
    """An engine that answers."""

    @property
    def pid(self) -> int:
        """Root of its process tree."""
        ...

    @property
    def start_seconds(self) -> float:
        """From its start until it could serve."""
        ...

    def closed(self, requests: Sequence[Request], clients: int) -> list[Record]:
        """Run all requests with that many clients, each of which sends its next one when the last has ended."""
        ...

    def open(self, requests: Sequence[Request], arrivals: Sequence[float]) -> list[Record]:
        """Run each request from its own time on, in seconds from now."""
        ...


@dataclass(frozen=True, slots=True)
class _RunningServer:
    server: Server
    pid: int
    start_seconds: float

    def closed(self, requests: Sequence[Request], clients: int) -> list[Record]:
        server = self.server
        return asyncio.run(closed_loop(server.url, requests, clients, server.body, keep_alive=server.keep_alive))

    def open(self, requests: Sequence[Request], arrivals: Sequence[float]) -> list[Record]:
        server = self.server
        return asyncio.run(open_loop(server.url, requests, arrivals, server.body, keep_alive=server.keep_alive))


@dataclass(frozen=True, slots=True)
class _RunningDriver:
    process: subprocess.Popen[bytes]
    start_seconds: float

    @property
    def pid(self) -> int:
        return self.process.pid

    def closed(self, requests: Sequence[Request], clients: int) -> list[Record]:
        return self._run(requests, {"clients": clients})

    def open(self, requests: Sequence[Request], arrivals: Sequence[float]) -> list[Record]:
        return self._run(requests, {"arrivals": list(arrivals)})

    def _run(self, requests: Sequence[Request], how: dict[str, Any]) -> list[Record]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"requests": [asdict(one) for one in requests], **how}).encode() + b"\n")
        self.process.stdin.flush()
        records = [Record(**answer) for answer in _read_line(self.process)]
        for record, request in zip(records, requests, strict=True):
            record.error = mismatch(record, request)
        return records


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


@contextmanager
def running(server: Server | Driver, log: Path) -> Iterator[Running]:
    """Start an engine, wait until it can serve, and stop it with everything it started.

    Raises:
        RuntimeError: its port is taken, it ended, or it was not ready in time; the message names its log.
    """
    if isinstance(server, Server) and _answers(server):
        raise RuntimeError(f"something answers on port {server.port} already; stop it, {server.name} is to run there")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        begin = perf_counter()
        driven = isinstance(server, Driver)
        process = subprocess.Popen(
            server.command,
            stdout=subprocess.PIPE if driven else output,
            stderr=output,
            stdin=subprocess.PIPE if driven else subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(server.environment if isinstance(server, Server) else {})},
        )
        try:
            if isinstance(server, Driver):
                _read_line(process)
                yield _RunningDriver(process, perf_counter() - begin)
            else:
                _wait(server, process, log)
                yield _RunningServer(server, process.pid, perf_counter() - begin)
        except BaseException:  # nobody waits for answers any more, so there is nothing to drain
            process.kill()
            raise
        finally:
            _stop(process)


def _read_line(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with exit code {process.wait()}; see its log")
    return json.loads(line)


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
    """End a process, and then whatever it has left in its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
