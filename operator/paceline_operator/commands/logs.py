"""`paceline logs NAME`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline_operator.commands.service import add_service, chosen_folder, full_name
from paceline_operator.local.errors import NotRunning
from paceline_operator.local.state import StateFolder

_POLL_SECONDS = 0.2


def main(arguments: Sequence[str]) -> int:
    """Print the logs of a service's pods; also those of its last run, when it is not up."""
    parser = argparse.ArgumentParser(
        prog="paceline logs", description="Print what the servers of an LLMService on this machine have logged."
    )
    add_service(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing while the service is up")
    chosen = parser.parse_args(arguments)
    folder = chosen_folder(chosen)
    if not _logs(folder):
        raise NotRunning(f"{full_name(chosen)} has not run on this machine; `paceline status` lists what does")
    positions: dict[Path, int] = {}
    while True:
        going_on = chosen.follow and folder.holder() is not None
        for line in _new_lines(folder, positions):
            sys.stdout.write(line)
        sys.stdout.flush()
        if not going_on:
            return 0
        time.sleep(_POLL_SECONDS)


def _logs(folder: StateFolder) -> list[Path]:
    """The pods' logs, of the oldest pod first."""
    return sorted(folder.pods.glob("*/server.log"), key=lambda log: log.stat().st_ctime)


def _new_lines(folder: StateFolder, positions: dict[Path, int]) -> Iterator[str]:
    """What has been written since the last call; each line with its pod's name where there are several."""
    logs = _logs(folder)
    for log in logs:
        with log.open("rb") as file:
            file.seek(positions.get(log, 0))
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        positions[log] = positions.get(log, 0) + len(whole)
        prefix = f"[{log.parent.name}] " if len(logs) > 1 else ""
        yield from (f"{prefix}{line}\n" for line in whole.decode(errors="replace").splitlines())
