"""The `paceline` command: leads to one module of `commands` for each word.

Only the module that is asked for is imported: `up` and `status` answer at once, without the Kubernetes client.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from paceline_operator.errors import PacelineError

COMMANDS = {
    "up": "run an LLMService on this machine, without a cluster",
    "down": "stop an LLMService that runs on this machine",
    "status": "list the LLMServices that run on this machine",
    "logs": "print the logs of an LLMService that runs on this machine",
    "operator": "run the operator, in a cluster",
    "adapter": "run the metrics adapter, in a cluster",
}

_PIPE_CLOSED = 141  # the shell's status for what SIGPIPE has ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Serve language models as LLMServices.",
        epilog="\n".join(f"  {name:10}{summary}" for name, summary in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {version('paceline-operator')}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="`paceline COMMAND --help` tells")
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        parser.print_help()
        return 2
    chosen = parser.parse_args(words)
    try:
        command = importlib.import_module(f"paceline_operator.commands.{chosen.command}")
        return int(command.main(chosen.arguments))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `paceline logs … | head`: whoever read has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor is there anybody to flush to at the exit
        return _PIPE_CLOSED


if __name__ == "__main__":
    sys.exit(main())
