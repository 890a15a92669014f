"""`make env` says in a few lines what it does, and all of it when that fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "env.sh"


def function(name: str) -> str:
    """The text of a function of the script."""
    text = SCRIPT.read_text()
    return text[text.index(f"{name}() {{") : text.index("\n}\n", text.index(f"{name}() {{"))] + "\n}\n"


def quietly(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """The script's function around a command."""
    (folder / ".venv").mkdir()
    script = f"set -euo pipefail\n{function('quietly')}\nquietly bash -c '{command}'"
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_output_of_an_installation_that_works_is_one_line(tmp_path: Path) -> None:
    done = quietly(tmp_path, "for package in {1..100}; do echo + $package; done")
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert line.startswith("env: installed after ")
    assert done.stderr == ""


def test_the_output_of_an_installation_that_fails_is_shown_whole(tmp_path: Path) -> None:
    failed = quietly(tmp_path, "echo looking; echo no such package >&2; exit 2")
    assert failed.returncode != 0
    assert failed.stderr.splitlines()[:2] == ["looking", "no such package"]
    assert "env: failed: bash -c" in failed.stderr
    assert "installed" not in failed.stdout


@pytest.mark.parametrize(("said", "seen"), [({}, "true"), ({"UV_SYSTEM_CERTS": "false"}, "false")])
def test_uv_trusts_whom_the_machine_trusts_unless_it_is_told_otherwise(
    tmp_path: Path, said: dict[str, str], seen: str
) -> None:
    """The whole script, in an environment in which nothing of certificates is set; pip and uv do nothing but look."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "env.sh").write_text(SCRIPT.read_text())
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, line in (("python", "exit 0"), ("uv", 'echo "$UV_SYSTEM_CERTS" >seen')):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **said}
    subprocess.run(["bash", "scripts/env.sh"], cwd=tmp_path, env=environment, timeout=60, check=True)
    assert (tmp_path / "seen").read_text() == f"{seen}\n"


@pytest.mark.parametrize(
    ("log", "stage"),
    [
        ("", "unpacking and compiling"),
        ("Resolved 90 packages\nDownloading torch (190MiB)\nDownloading triton\n", "0 of 2 large downloads done"),
        ("Downloading torch (190MiB)\nDownloading triton\n Downloaded triton\n", "1 of 2 large downloads done"),
        ("Downloading triton\n Downloaded triton\n", "unpacking and compiling"),
    ],
)
def test_downloads_are_counted_only_while_there_are_some(tmp_path: Path, log: str, stage: str) -> None:
    (tmp_path / "log").write_text(log)
    script = f"set -euo pipefail\n{function('stage')}\nstage log"
    said = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == f"{stage}\n"
