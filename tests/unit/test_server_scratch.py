"""Temporary folders go with their process, or with the next one that does the same work."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline_server.scratch import scratch_folder

WORK = """
import sys, time
from pathlib import Path
from paceline_server.scratch import scratch_folder, unwind_on_sigterm
unwind_on_sigterm()
with scratch_folder(Path(sys.argv[1]), ".work-") as folder:
    (folder / "half").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


def begin_work(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder, and the folder."""
    command = [sys.executable, "-c", WORK, str(parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_the_folder(tmp_path: Path, number: signal.Signals) -> None:
    process, folder = begin_work(tmp_path)
    assert (folder / "half").exists()
    process.send_signal(number)
    assert process.wait(30) != 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    killed, left = begin_work(tmp_path)
    killed.kill()
    killed.wait()
    assert left.exists()
    working, held = begin_work(tmp_path)
    (tmp_path / ".work-file").touch()
    (tmp_path / "model").mkdir()
    assert not left.exists()
    with scratch_folder(tmp_path, ".work-"):
        assert held.exists(), "another one is at work in it"
    assert {path.name for path in tmp_path.iterdir()} == {held.name, ".work-file", "model"}
    working.terminate()
    working.wait(30)


def test_what_a_folder_holds_is_kept_by_renaming_it(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "store", ".work-") as folder:
        (folder / "whole").touch()
        folder.replace(tmp_path / "store" / "model")
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["model"]
    assert (tmp_path / "store" / "model" / "whole").exists()
