"""Init of one container process: no server outlives `paceline up`, however that ends.

`process` starts it as `python -m paceline_operator.local.shim COMMAND ARG…` in a session of its own, with standard
input as its lifeline: the other end closes when `paceline up` is gone, even by SIGKILL, and then everything in the
session is killed. The shim passes SIGTERM on to the command, and takes what the command left behind with it when the
command ends. Should the shim itself be killed, the kernel kills the command (PR_SET_PDEATHSIG).

It exits with the command's status, or 128 + signal as a container does.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys

from paceline_operator.local import session

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CANNOT_START = 127  # the shell's status for a command that cannot be run


def main() -> None:
    """Run the command of the command line and exit as it did."""
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # one that comes now waits until there is a child
    child = _start(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    status = _wait(child, wakeup_read)
    session.kill(os.getsid(0))
    os._exit(status)


def _start(command: list[str]) -> int:
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # libc is loaded before the fork: little is safe after it
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(_CANNOT_START)


def _wait(child: int, wakeup: int) -> int:
    """Until the command ends: its status. When the lifeline closes: the status of a killed command."""
    while True:
        readable, _, _ = select.select([sys.stdin, wakeup], [], [])
        if wakeup in readable:
            os.read(wakeup, 4096)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return _exit_status(status)
        if sys.stdin in readable:
            return 128 + signal.SIGKILL


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
