"""The `paceline` command as a user has it: detached services, their table and logs, and a supervisor that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from paceline_operator import cli
from paceline_operator.cluster import Key, Manifest
from paceline_operator.local.detached import Detached
from paceline_operator.local.errors import StartFailed
from paceline_operator.local.state import Snapshot, Start, StateFolder
from paceline_operator.local.testing import fake_service


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that has the state of all services; what still runs at the end is killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path
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
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in a minute"
        time.sleep(0.05)


def up_command(folder: Path, service: Manifest, *options: str) -> list[str]:
    """`paceline up`, for a process of its own."""
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(service))
    return [sys.executable, "-m", "paceline_operator.cli", "up", str(file), "--port", "0", *options]


def run_up(folder: Path, service: Manifest, *options: str) -> subprocess.CompletedProcess[str]:
    command = up_command(folder, service, *options)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_detached_service_is_listed_logged_and_stopped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    up = run_up(folder, fake_service(), "--detach", "--prompt", "Where?")
    assert up.returncode == 0, up.stderr
    assert "The capital of France is Paris." in up.stdout
    assert "paceline down fake" in up.stdout
    url = next(word for word in up.stdout.split() if word.startswith("http://127.0.0.1"))
    with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
        assert json.load(answer)["ready"]
    assert cli.main(["status"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "MODEL", "READY", "REPLICAS", "QUEUE", "TTFT-P95", "URL", "REASON", "AGE"]
    assert row.split()[:4] == ["fake", "hf://fake/Model", "True", "1/1"]
    assert cli.main(["logs", "fake"]) == 0
    assert cli.main(["down", "fake"]) == 0
    until(lambda: not servers_of(folder))
    capsys.readouterr()
    assert cli.main(["status"]) == 0
    assert "No LLMService runs" in capsys.readouterr().err


def test_a_detached_service_that_cannot_start_fails_with_the_reason_and_leaves_nothing(folder: Path) -> None:
    up = run_up(folder, fake_service(model="hf://fake/missing"), "--detach")
    assert up.returncode == 1
    assert "ModelNotFound" in up.stderr
    assert (up.stdout + up.stderr).count("ModelNotFound") == 1, "it is said once"
    assert servers_of(folder) == []


def test_of_two_that_detach_the_same_service_the_later_one_says_so_and_leaves_the_others_log_alone(
    folder: Path,
) -> None:
    """They may start at the same moment: neither knows then which of them will have the service."""
    assert run_up(folder, fake_service(), "--detach").returncode == 0
    state = StateFolder.of(Key("default", "fake"), os.environ)
    before = state.log.read_text()
    late = Detached.start(state, [str(folder / "service.yaml"), "--port", "0"])

    def is_refused() -> bool:
        try:
            return late.read() is not None
        except StartFailed as error:
            return str(error).startswith("fake is up already")

    until(is_refused)
    assert before
    assert state.log.read_text().startswith(before)
    assert [path.name for path in state.path.glob("*.log")] == ["up.log"]
    assert cli.main(["down", "fake"]) == 0


def test_a_detached_service_whose_port_is_taken_says_who_is_there_and_how_the_user_stops_it(folder: Path) -> None:
    """By the path that the user has typed, though another program starts the service."""
    program = folder / "bin" / "paceline"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom paceline_operator.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    command = [str(program), *up_command(folder, fake_service(), "--detach")[3:]]
    up = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=of_this_checkout())
    port = next(word for word in up.stdout.split() if word.startswith("http://127.0.0.1")).split(":")[2].split("/")[0]
    other = [str(program), *up_command(folder, fake_service("other"), "--detach", "--port", port)[3:]]
    refused = subprocess.run(other, capture_output=True, text=True, timeout=60, check=False, env=of_this_checkout())
    assert refused.returncode == 1
    assert f"the LLMService fake is up there: stop it with `{program} down fake`" in refused.stderr
    assert cli.main(["down", "fake"]) == 0


def of_this_checkout() -> dict[str, str]:
    """The environment of a program that lies elsewhere and is to find the packages of this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_sigkill_of_paceline_up_leaves_no_server_and_no_service_in_the_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def table() -> str:
        cli.main(["status"])
        return "".join(capsys.readouterr())

    service = fake_service(replicas=2)
    with subprocess.Popen(up_command(folder, service), stdout=subprocess.DEVNULL) as up:
        until(lambda: "True" in table())
        assert len(servers_of(folder)) >= 3  # paceline up, and at least one shim with its server
        up.kill()
    until(lambda: not servers_of(folder))
    assert "No LLMService runs" in table()
    assert run_up(folder, service, "--prompt", "Again?").returncode == 0


@pytest.mark.parametrize("left", ["", "[]", '{"pid": 1, "url": "http://127.0.0.1:8000", "service": {}}'])
def test_what_another_release_or_a_power_cut_left_of_a_snapshot_is_passed_over(
    folder: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the table nor who looks for the holder of a port ends with it, whether or not that service is up."""
    state = StateFolder.of(Key("default", "old"), os.environ)
    with state.lock():
        (state.path / "snapshot.json").write_text(left)
        assert state.read() is None
    cli.main(["status"])
    assert "old" not in capsys.readouterr().out


def test_what_makes_a_service_slower_stands_below_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = StateFolder.of(Key("default", "fake"), os.environ)
    service = {**fake_service(), "spec": {"model": "hf://a/b", "replicas": 1}}
    with state.lock():
        start = Start(warnings=("slower: set spec.engine.dtype",), over=True)
        state.write(Snapshot(os.getpid(), "http://127.0.0.1:8000", service, starts={"a": start, "b": start}))
        assert cli.main(["status"]) == 0
    output = capsys.readouterr()
    assert output.err == "! fake: slower: set spec.engine.dtype\n"
    assert len(output.out.splitlines()) == 2


def test_mistakes_in_the_file_are_printed_each_on_a_line_and_nothing_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, file = up_command(folder, fake_service(replicas=-1, modle="x"))[:5]
    assert cli.main(["up", file]) == 1
    mistakes = capsys.readouterr().err.splitlines()[1:]
    assert [mistake.split(":")[0].strip() for mistake in mistakes] == ["spec.replicas", "spec.modle"]
    assert not (folder / "paceline").exists()


@pytest.mark.parametrize("command", ["down", "logs"])
def test_a_service_that_does_not_run_is_told_by_namespace_and_name(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A namesake may run in another namespace, for which the name alone would be untrue."""
    assert cli.main([command, "nobody"]) == 1
    assert cli.main([command, "nobody", "--namespace", "elsewhere"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("paceline: default/nobody ")
    assert second.startswith("paceline: elsewhere/nobody ")


@pytest.mark.parametrize("port", ["abc", "-1", "65536", "8000.5", "", "٣"])
def test_a_port_that_is_none_is_refused_by_what_was_written(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["up", "service.yaml", f"--port={port}"])
    assert f"argument --port: {port!r} is not a port: a number from 0 to 65535" in capsys.readouterr().err


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert re.fullmatch(r"paceline \d+\.\d+\.\d+\n", capsys.readouterr().out)


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
