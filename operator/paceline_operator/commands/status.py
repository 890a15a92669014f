"""`paceline status`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from paceline_operator.local import columns
from paceline_operator.local.state import StateFolder


def main(arguments: Sequence[str]) -> int:
    """Print the LLMServices that run on this machine, as `kubectl get llm` prints those of a namespace."""
    argparse.ArgumentParser(
        prog="paceline status",
        description="List the LLMServices that run on this machine, with the columns of `kubectl get llm` and the "
        "replicas, ready/desired.",
    ).parse_args(arguments)
    snapshots = [snapshot for folder in StateFolder.all(os.environ) if (snapshot := folder.read())]
    if not snapshots:
        print("No LLMService runs on this machine.", file=sys.stderr)
        return 0
    print(columns.table([snapshot.service for snapshot in snapshots], datetime.now(UTC)))
    for snapshot in snapshots:
        for warning in snapshot.warnings:
            print(f"! {snapshot.service['metadata']['name']}: {warning}", file=sys.stderr)
    return 0
