"""`paceline down NAME`."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence

from paceline_operator.commands.service import add_service, chosen_folder, full_name
from paceline_operator.local.errors import NotRunning

_POLL_SECONDS = 0.1


def main(arguments: Sequence[str]) -> int:
    """Stop an LLMService that runs on this machine."""
    parser = argparse.ArgumentParser(
        prog="paceline down",
        description="Stop an LLMService that runs on this machine: running requests are finished first.",
    )
    add_service(parser)
    chosen = parser.parse_args(arguments)
    folder = chosen_folder(chosen)
    process = folder.holder()
    if process is None:
        raise NotRunning(f"{full_name(chosen)} does not run on this machine; `paceline status` lists what does")
    print(f"draining {chosen.name} (process {process})", flush=True)
    os.kill(process, signal.SIGTERM)
    while folder.holder() == process:
        time.sleep(_POLL_SECONDS)
    print("stopped")
    return 0
