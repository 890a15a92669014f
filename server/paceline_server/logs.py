"""One log format for the gateway and the engine process; `cli` and `engine.process` set it up at their start."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: int = logging.INFO) -> None:
    """Send log lines to stderr: time, level, logger, message."""
    logging.basicConfig(
        level=level, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
