"""Background programs of a test cluster that cannot outlive the test run.

Each is started with a parent-death signal: when pytest goes away, even by SIGKILL, the kernel ends the program. Used by
`api_server` and `node`.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster.errors import Failed


class Process:
    """One program in the background, its output in one log file."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, *, death_signal: str = "KILL") -> None:
        """Start the program; `death_signal` is what it gets when our process dies."""
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                [*_bound_to_us(death_signal), *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for pytest, which then stops its programs in order
            )

    @property
    def pid(self) -> int:
        """The process's id; `setpriv` replaces itself, so it is the program's own."""
        return self._popen.pid

    def running(self) -> bool:
        """Whether the program has not ended."""
        return self._popen.poll() is None

    def tail(self, lines: int = 20) -> str:
        """Return the end of the program's log, for error messages."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when `ready()` holds.

        Raises:
            Failed: when the program ends first, or `seconds` pass; with the end of its log.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running():
                raise Failed(f"{self.name} ended with code {self._popen.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise Failed(f"{self.name} was not ready after {seconds:.0f} s:\n{self.tail()}")
            time.sleep(0.05)

    def stop(self, grace: float = 5.0) -> None:
        """End the program: SIGTERM, then SIGKILL after `grace` seconds; returns when it is gone."""
        if self.running():
            self._popen.terminate()
            try:
                self._popen.wait(grace)
            except subprocess.TimeoutExpired:
                self._popen.kill()
        self._popen.wait()


def _bound_to_us(signal: str) -> list[str]:
    """Return a command prefix that ties a program's life to ours; empty where the kernel has no such thing.

    The kernel watches the thread that starts the program, so cluster fixtures start theirs from pytest's main thread.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", signal, "--"] if setpriv else []


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def http_ok(url: str, authority: Path | None = None) -> bool:
    """Whether a GET of this URL succeeds; `authority` is the certificate that the server's must be signed by."""
    trust = ssl.create_default_context(cafile=str(authority)) if authority else None
    try:
        with urllib.request.urlopen(url, timeout=2, context=trust) as response:
            return bool(response.status == 200)
    except OSError:  # URLError is one
        return False


@contextlib.contextmanager
def all_stopped(processes: Sequence[Process]) -> Iterator[None]:
    """Stop the processes on leaving, last started first."""
    try:
        yield
    finally:
        for process in reversed(processes):
            process.stop()
