"""How the user can call this program, for messages that say what to type. Used by `up` and `occupied`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PROGRAM = "PACELINE_PROGRAM"
"""Tells a detached `paceline up` by which name or path the user has called the program."""
PORT_OPTION = "PACELINE_PORT_OPTION"
"""How the user chooses the port, where something calls `paceline up` for them: `make demo` sets it."""


def called_as() -> str:
    """The program as the user has called it."""
    return os.environ.get(PROGRAM, sys.argv[0])


def paceline(*words: str) -> str:
    """A command line: with the bare name where the PATH leads to this program, else with its path."""
    program = Path(called_as())
    found = shutil.which("paceline")
    if program.name != "paceline" or (found and os.path.samefile(found, program)):
        return " ".join(("paceline", *words))
    inside = program.is_relative_to(Path.cwd())
    return " ".join((str(program.relative_to(Path.cwd()) if inside else program), *words))


def another_port() -> str:
    """What the user writes to choose another port."""
    return os.environ.get(PORT_OPTION, "--port N")
