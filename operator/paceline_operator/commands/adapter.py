"""`paceline adapter`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline_operator.adapter.server import run_adapter
from paceline_operator.adapter.settings import AdapterSettings
from paceline_operator.commands.flags import parse_settings
from paceline_operator.commands.logging import configure_logging


def main(arguments: Sequence[str]) -> int:
    """Run the metrics adapter."""
    settings = parse_settings(
        AdapterSettings, "paceline adapter", "Serve the metrics that the HPA scales LLMServices on.", arguments
    )
    configure_logging()
    asyncio.run(run_adapter(settings))
    return 0
