"""Errors of the metrics adapter.

PacelineError (the package's root)
└── AdapterError
    ├── ScrapeError     a pod's /metrics could not be read; its numbers are missing, which is not the same as zero
    ├── SetupError      the adapter cannot serve as it is installed; the message says what to change
    └── UnknownService  no LLMService of that name exists
"""

from __future__ import annotations

from paceline_operator.errors import PacelineError


class AdapterError(PacelineError):
    """Base of every error that the metrics adapter raises on purpose."""


class ScrapeError(AdapterError):
    """A pod's /metrics could not be fetched, or did not hold the numbers that we need."""


class SetupError(AdapterError):
    """Something that the installation has to provide is not there; a restart alone does not help."""


class UnknownService(AdapterError):
    """No LLMService of that name exists in that namespace."""
