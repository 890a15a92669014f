"""How the user can call this program, for messages that say what to type. Used by `up`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def paceline(*words: str) -> str:
    """A command line: with the bare name where the PATH leads to this program, else with its path."""
    program = Path(sys.argv[0])
    found = shutil.which("paceline")
    if program.name != "paceline" or (found and os.path.samefile(found, program)):
        return " ".join(("paceline", *words))
    inside = program.is_relative_to(Path.cwd())
    return " ".join((str(program.relative_to(Path.cwd()) if inside else program), *words))
