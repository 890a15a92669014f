"""`paceline up` with the real server: it answers, survives the loss of its processes, and leaves none of them behind.

The tests of one module share one service, in their order, since a start takes seconds; the last one ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_operator.cluster import Key
from paceline_operator.local import session
from paceline_operator.local.state import Snapshot, StateFolder

SAMPLE = Path(__file__).resolve().parents[2] / "manifests" / "samples" / "smollm2.yaml"
KEY = Key("default", "smollm2")
QUESTION = "Name the capital city of France."
START_SECONDS = 240


class Service:
    """A `paceline up` of the sample in a process of its own."""

    def __init__(self, folder: Path, model_store: Path) -> None:
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder), "PACELINE_MODEL_STORE": str(model_store)}
        self.state = StateFolder.of(KEY, self.environment)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "paceline_operator.cli", "up", str(SAMPLE), "--port", "0", *words]

    def start(self) -> None:
        """Have it up, if it is not, and ready."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self.command(), env=self.environment, stdout=subprocess.DEVNULL)
        until(self.is_ready)

    @property
    def snapshot(self) -> Snapshot:
        """The service as it is published; it must be up."""
        snapshot = self.state.read()
        assert snapshot is not None, "paceline up has ended"
        return snapshot

    def container(self) -> dict[str, Any]:
        (pod,) = self.snapshot.pods
        (status,) = pod["status"]["containerStatuses"]
        return dict(status)

    def is_ready(self) -> bool:
        """Whether the service says so; False before it says anything."""
        snapshot = self.state.read()
        conditions = snapshot.service["status"].get("conditions", ()) if snapshot else ()
        return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)

    def processes(self) -> dict[str, int]:
        """The server's processes by what they are."""
        (shim,) = (pid for pid in all_processes() if "local.shim" in command_line(pid) and self.owns(pid))
        kinds = {"engine": "paceline_server.engine.process", "gateway": "bin/paceline-server serve"}
        members = session.members(shim) - {shim}
        return {kind: pid for kind, words in kinds.items() for pid in members if words in command_line(pid)}

    def owns(self, pid: int) -> bool:
        return str(self.state.path) in command_line(pid)

    def chat(self, **body: Any) -> Any:
        """Send a chat request; the answer as it comes."""
        data = json.dumps({"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], **body}).encode()
        request = urllib.request.Request(f"{self.snapshot.url}/v1/chat/completions", data)
        request.add_header("Content-Type", "application/json")
        return urllib.request.urlopen(request, timeout=120)


def all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Have a process stand still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until(condition: Callable[[], object], seconds: float = START_SECONDS) -> None:
    """Wait for what other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about in {seconds:g} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, smollm2_model: Path) -> Iterator[Service]:
    """The sample, ready."""
    service = Service(tmp_path_factory.mktemp("local"), smollm2_model.parents[1])
    try:
        service.start()
        yield service
    finally:
        if service.process is not None:
            service.process.kill()
            service.process.wait()


def test_the_service_answers_through_its_front_door(service: Service) -> None:
    with service.chat(temperature=0, max_tokens=16) as answer:
        assert "Paris" in json.load(answer)["choices"][0]["message"]["content"]


def test_a_second_paceline_up_with_a_prompt_asks_the_running_service(service: Service) -> None:
    command = service.command("--prompt", QUESTION)
    asked = subprocess.run(command, env=service.environment, capture_output=True, text=True, timeout=120, check=False)
    assert asked.returncode == 0, asked.stderr
    for words in ("Paris", "TTFT", "tokens/s", "NAME      MODEL"):
        assert words in asked.stdout


def test_sigkill_of_the_engine_ends_the_stream_with_an_error_and_costs_readiness_but_no_pod(service: Service) -> None:
    restarts, lost = service.container()["restartCount"], service.processes()["engine"]
    with service.chat(stream=True, max_tokens=2000, ignore_eos=True) as answer:
        assert answer.readline().startswith(b"data:")
        os.kill(lost, signal.SIGKILL)
        rest = answer.read().decode()
    frames = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: {")]
    assert "error" in frames[-1]
    assert '"finish_reason":"stop"' not in rest.replace(" ", "")
    until(lambda: service.processes().get("engine", lost) != lost)
    with held(service.processes()["engine"]):  # it may be ready before a probe has missed the old one
        until(lambda: not service.is_ready())
        with pytest.raises(urllib.error.HTTPError, match="503"):
            service.chat(max_tokens=1)
    until(service.is_ready)
    assert service.container()["restartCount"] == restarts
    test_the_service_answers_through_its_front_door(service)


def test_sigkill_of_the_gateway_restarts_the_container_and_takes_the_engine_along(service: Service) -> None:
    restarts, before = service.container()["restartCount"], service.processes()
    os.kill(before["gateway"], signal.SIGKILL)
    until(lambda: service.container()["restartCount"] == restarts + 1, seconds=30)
    until(service.is_ready)
    assert not set(service.processes().values()) & set(before.values())
    assert service.container()["lastState"]["terminated"]["exitCode"] == 137


def test_sigkill_of_paceline_up_leaves_none_of_its_processes(service: Service) -> None:
    members = set(service.processes().values())
    assert len(members) == 2
    assert service.process is not None
    service.process.kill()
    service.process.wait()
    until(lambda: not [pid for pid in all_processes() if service.owns(pid) or pid in members], seconds=10)
    assert service.state.read() is None


def test_ctrl_c_finishes_the_running_stream_and_ends_with_0(service: Service) -> None:
    service.start()
    assert service.process is not None
    with service.chat(stream=True, max_tokens=30, ignore_eos=True) as answer:
        assert answer.readline().startswith(b"data:")
        service.process.send_signal(signal.SIGINT)
        assert answer.read().decode().rstrip().endswith("data: [DONE]")
    assert service.process.wait(timeout=60) == 0
    assert not [pid for pid in all_processes() if service.owns(pid)]


def test_a_model_that_does_not_exist_is_told_with_a_failing_exit(tmp_path: Path, smollm2_model: Path) -> None:
    manifest = SAMPLE.read_text().replace("hf://HuggingFaceTB/SmolLM2-135M-Instruct", f"file://{tmp_path}/nothing")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "service.yaml").write_text(manifest)
    command = [sys.executable, "-m", "paceline_operator.cli", "up", str(tmp_path / "service.yaml"), "--port", "0"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PACELINE_MODEL_STORE": str(smollm2_model.parents[1])}
    asked = subprocess.run(
        [*command, "--prompt", "x"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert asked.returncode == 1
    assert "ModelNotFound" in asked.stderr
    assert f"{tmp_path}/nothing" in asked.stderr
