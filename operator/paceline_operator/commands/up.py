"""`paceline up FILE`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from paceline_operator.local.up import UpOptions, up

_LAST_PORT = 65535


def main(arguments: Sequence[str]) -> int:
    """Run an LLMService on this machine."""
    parser = argparse.ArgumentParser(
        prog="paceline up",
        description="Run an LLMService on this machine, without a cluster: the pods that the operator renders, as "
        "processes, with their probes, restarts, drain and scaling. It ends with Ctrl-C.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="manifest with one LLMService")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, metavar="N", help="port to listen on (default: 8000; 0: any free one)")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, whatever spec.resources says of GPUs")
    parser.add_argument("--prompt", metavar="TEXT", help="ask this when ready, print answer and numbers, and end")
    parser.add_argument("--detach", action="store_true", help="leave it running in the background when it is ready")
    parser.add_argument(
        "--secrets",
        type=Path,
        metavar="FOLDER",
        help="where Secrets are: the key KEY of the Secret NAME is the file NAME/KEY (default: $PACELINE_SECRETS)",
    )
    chosen = parser.parse_args(arguments)
    return asyncio.run(up(UpOptions(**vars(chosen))))


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 0 to {_LAST_PORT}")
    return int(text)
