"""`paceline operator`."""

from __future__ import annotations

from collections.abc import Sequence

from paceline_operator.commands.flags import parse_settings
from paceline_operator.commands.logging import configure_logging
from paceline_operator.run import run_operator
from paceline_operator.settings import OperatorSettings


def main(arguments: Sequence[str]) -> int:
    """Run the operator."""
    settings = parse_settings(
        OperatorSettings, "paceline operator", "Run the operator against a Kubernetes API server.", arguments
    )
    configure_logging()
    return run_operator(settings)
