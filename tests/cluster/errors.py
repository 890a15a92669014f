"""Errors of the test clusters, and the difference that the fixtures care about.

ClusterError
├── Unavailable   this machine cannot have the cluster (no root, no Go, …): dependent tests skip with this reason
└── Failed        it should have worked and did not: dependent tests fail, with the end of the program's log
"""

from __future__ import annotations


class ClusterError(Exception):
    """Anything that keeps a test cluster from running."""


class Unavailable(ClusterError):
    """Something that the cluster needs is not on this machine; the message says what, and how to get it."""


class Failed(ClusterError):
    """A step that should work on this machine failed; the message carries the evidence."""
