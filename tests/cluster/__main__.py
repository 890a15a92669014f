"""The test clusters from the command line: `PYTHONPATH=tests python -m cluster COMMAND`.

prepare      build and install what the tests' clusters need on this machine (`make cluster` runs it)
build NAME…  build single programs into the cache
up DIR       bring up a cluster with its files in DIR, say how to use it, and take it down on Ctrl-C
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
from pathlib import Path

from cluster import build, components, sources
from cluster.errors import Failed, Unavailable


def main() -> int:
    """Run one command; returns the exit code. A machine that lacks something is told so, and that is no failure."""
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare")
    commands.add_parser("build").add_argument("name", nargs="+", choices=sorted(components.COMPONENTS))
    commands.add_parser("up").add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        if options.command == "prepare":
            sources.prepare()
        elif options.command == "build":
            build.build(options.name)
        else:
            _hold(options.folder)
    except Unavailable as reason:
        print(f"  not on this machine: {reason}")
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def _hold(folder: Path) -> None:
    """Keep a cluster up until Ctrl-C."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise Failed(f"{folder} is not empty")
    with sources.running(folder.resolve()) as cluster:
        print(f"{cluster.source} is up; Ctrl-C takes it down. Use it with:\n")
        print(f"  {shlex.join(cluster.kubectl.program)} --kubeconfig={cluster.kubeconfig} get pods -A\n", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    sys.exit(main())
