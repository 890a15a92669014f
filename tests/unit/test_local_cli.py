"""The `paceline` command as a user has it: detached services, their table and logs, and a supervisor that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from paceline_operator import cli
from paceline_operator.cluster import Manifest
from paceline_operator.local.testing import fake_service

Environment = dict[str, str]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An environment with a state folder of its own; what still runs at the end is killed."""
    yield {**os.environ, "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    for pid in servers_of(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def servers_of(folder: Path) -> list[int]:
    """Processes that were started with a file below the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


def until(condition: Callable[[], object]) -> None:
    """Wait for what other processes do."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in 30 s"
        time.sleep(0.05)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "paceline_operator.cli", *words]


def paceline(environment: Environment, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), env=environment, capture_output=True, text=True, timeout=60, check=False)


def write(folder: Path, service: Manifest) -> str:
    file = folder / f"{service['metadata']['name']}.yaml"
    file.write_text(yaml.safe_dump(service))
    return str(file)


def test_a_detached_service_is_listed_logged_and_stopped(tmp_path: Path, environment: Environment) -> None:
    file = write(tmp_path, fake_service())
    up = paceline(environment, "up", file, "--port", "0", "--detach", "--prompt", "Where?")
    assert up.returncode == 0, up.stderr
    assert "The capital of France is Paris." in up.stdout
    assert "paceline down fake" in up.stdout
    url = next(word for word in up.stdout.split() if word.startswith("http://127.0.0.1"))
    with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
        assert json.load(answer)["ready"]
    status = paceline(environment, "status").stdout.splitlines()
    assert len(status) == 2
    assert status[1].split()[:3] == ["fake", "hf://fake/Model", "True"]
    assert paceline(environment, "logs", "fake").returncode == 0
    assert paceline(environment, "down", "fake").returncode == 0
    until(lambda: not servers_of(tmp_path))
    assert "No LLMService runs" in paceline(environment, "status").stderr


def test_a_detached_service_that_cannot_start_fails_with_the_reason_and_leaves_nothing(
    tmp_path: Path, environment: Environment
) -> None:
    up = paceline(
        environment, "up", write(tmp_path, fake_service(model="hf://fake/missing")), "--port", "0", "--detach"
    )
    assert up.returncode == 1
    assert "ModelNotFound" in up.stderr
    assert servers_of(tmp_path) == []


def test_sigkill_of_paceline_up_leaves_no_server_and_no_service_in_the_table(
    tmp_path: Path, environment: Environment
) -> None:
    file = write(tmp_path, fake_service(replicas=2))
    with subprocess.Popen(command("up", file, "--port", "0"), env=environment, stdout=subprocess.DEVNULL) as up:
        until(lambda: "True" in paceline(environment, "status").stdout)
        assert len(servers_of(tmp_path)) >= 3  # paceline up, and at least one shim with its server
        up.kill()
    until(lambda: not servers_of(tmp_path))
    assert "No LLMService runs" in paceline(environment, "status").stderr
    assert paceline(environment, "up", file, "--port", "0", "--prompt", "Again?").returncode == 0


def test_mistakes_in_the_file_are_printed_each_on_a_line_and_nothing_starts(
    tmp_path: Path, environment: Environment
) -> None:
    service = fake_service(replicas=-1, modle="x")
    up = paceline(environment, "up", write(tmp_path, service))
    assert up.returncode == 1
    assert [line.split(":")[0].strip() for line in up.stderr.splitlines()[1:]] == ["spec.replicas", "spec.modle"]
    assert not (tmp_path / "paceline").exists()


@pytest.mark.parametrize("words", [("down", "nobody"), ("logs", "nobody")])
def test_a_service_that_does_not_run_is_told_by_its_name(environment: Environment, words: Sequence[str]) -> None:
    answer = paceline(environment, *words)
    assert answer.returncode == 1
    assert "nobody" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            cli.main([name, "--help"])
        assert f"paceline {name}" in capsys.readouterr().out


def test_the_settings_of_operator_and_adapter_are_flags_with_their_explanation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["operator", "--help"])
    operator = " ".join(capsys.readouterr().out.split())
    assert "--server-image STR image of the pods of services that set no `spec.image`" in operator
    assert "--lease-name STR" in operator
    with pytest.raises(SystemExit):
        cli.main(["adapter", "--help"])
    assert "--secret-name STR" in capsys.readouterr().out
