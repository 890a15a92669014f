"""What a failure is: the value that `failures`, `terminations` and `reconcile` find and `status` tells. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline_operator import conditions


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something does not work: a machine-readable reason and a message for people."""

    reason: str
    message: str


def forbidden(refusals: Iterable[str]) -> Failure:
    """What the operator may not read, in the API server's words, and what to do."""
    remedy = "give the operator this right again: helm upgrade, or kubectl apply of its install.yaml, restores its role"
    return Failure(conditions.FORBIDDEN, f"{'; '.join(refusals)}; {remedy}")
