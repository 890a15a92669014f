"""Virtual environments for peers, one each, made once, so that nobody's pins touch ours; and how a benchmark talks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CACHE = Path(os.environ.get("PACELINE_CACHE", Path.home() / ".cache" / "paceline"))
PEERS = CACHE / "bench"


def environment(name: str, packages: Sequence[str], overrides: Sequence[str] = ()) -> Path:
    """The folder of a virtual environment with these packages.

    Args:
        name: its folder under the cache.
        packages: requirements, pinned.
        overrides: requirements that win over what the packages ask for, such as a build of torch that can be had here.

    Raises:
        CalledProcessError: it cannot be made; its output is on stderr.
    """
    folder = PEERS / name
    stamp = folder / ".packages"
    wanted = "\n".join([*packages, "overrides:", *overrides])
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    say(f"installing {' '.join(packages)} into {folder} …")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [uv(), "pip", "install", "--quiet", "--compile-bytecode", "--python", str(folder / "bin" / "python")]
    command = [*install, *packages]
    if overrides:
        (folder / "overrides.txt").write_text("\n".join(overrides) + "\n")
        command += ["--override", str(folder / "overrides.txt")]
    # The installer looks into the system's store of certificates, as pip does.
    subprocess.run(command, check=True, env={"UV_SYSTEM_CERTS": "true", **os.environ})
    stamp.write_text(wanted)
    return folder


def uv() -> str:
    """The installer beside our own interpreter, or the machine's."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv") or "uv"


@contextmanager
def interruptible(last_words: str) -> Iterator[None]:
    """End a command that is interrupted, by Ctrl-C or SIGTERM, with a sentence instead of a traceback."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {last_words}")
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
