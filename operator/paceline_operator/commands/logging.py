"""The log format of the commands that run in a cluster."""

from __future__ import annotations

import logging
import sys


def configure_logging() -> None:
    """Send log lines to stderr: time, level, logger, message. The server of the other package logs in this form too."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
