"""The first moments of the server's process, and its last words."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

SERVER = [sys.executable, "-m", "paceline_server"]


def start(*arguments, **environment):
    return subprocess.Popen(
        [*SERVER, *arguments],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("delay", [0.15, 0.3, 0.6])
def test_sigterm_while_the_server_is_still_importing_ends_it_with_zero(tmp_path, delay):
    config = tmp_path / "engine.yaml"
    config.write_text("engine: {model_path: hf://nobody/nothing}\ngateway: {port: 0, host: 127.0.0.1}\n")
    process = start("serve", "--config", str(config), PACELINE_MODEL_STORE=str(tmp_path))
    wait_for_handler(process.pid)
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_a_missing_folder_is_told_at_once_with_its_reason(tmp_path):
    config = tmp_path / "engine.yaml"
    config.write_text("engine: {model_path: /nope}\ngateway: {port: 0}\n")
    termination = tmp_path / "termination-log"
    termination.touch()
    process = start("serve", "--config", str(config), PACELINE_TERMINATION_LOG=str(termination))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 78
    assert termination.read_text() == "ModelNotFound: there is no folder /nope"
    assert "ModelNotFound: there is no folder /nope" in errors
    assert "Traceback" not in errors


def test_three_mistakes_in_the_file_end_the_server_with_all_three_named(tmp_path):
    config = tmp_path / "engine.yaml"
    config.write_text("engine: {model_path: m, dtype: int3}\nkv_cache: {blocks: 1}\ngateway: {port: 99999}\n")
    process = start("serve", "--config", str(config))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 78
    for path in ("engine.dtype", "kv_cache.blocks", "gateway.port"):
        assert path in errors


def test_the_command_tells_its_version():
    process = start("--version")
    output, _ = process.communicate(timeout=60)
    assert re.fullmatch(r"paceline-server \d+\.\d+\.\d+\n", output)


@pytest.mark.parametrize("port", ["abc", "-1", "65536"])
def test_a_port_that_is_none_is_refused_by_what_was_written(port):
    process = start("serve", "--config", "engine.yaml", f"--port={port}")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"argument --port: {port!r} is not a port: a number from 0 to 65535" in errors


def wait_for_handler(pid):
    """Until the process catches SIGTERM, which it does before its slow imports."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/status") as status:
            caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
        if caught & (1 << (signal.SIGTERM - 1)):
            return
        time.sleep(0.005)
    raise AssertionError("no handler of SIGTERM")
