"""Errors of the metrics adapter.

AdapterError
└── ScrapeError     a pod's /metrics could not be read; its numbers are missing, which is not the same as zero
"""


class AdapterError(Exception):
    """Base of every error that the metrics adapter raises on purpose."""


class ScrapeError(AdapterError):
    """A pod's /metrics could not be fetched, or did not hold the numbers that we need."""
