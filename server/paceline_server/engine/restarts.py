"""Whether an engine that has died is started again, and after how long. `client` asks at the end of each life. Pure.

A life that was long proves that the engine can serve. What ends short ones is there again after the next start: a model
that does not fit any more, or a request that kills the engine and that its client repeats, at the cost of all others.
"""

from __future__ import annotations

LASTING_SECONDS = 60.0
"""Serving for so long proves a start good."""

_MAX_SHORT_LIVES = 5
_BACKOFF_SECONDS = 1.0
_LEAST_BUDGET_SECONDS = 120.0
_BUDGET_STARTS = 4.0


def start_budget(first: float) -> float:
    """Seconds after which a start hangs, where the first one took `first`: the files may come from a busy disk now."""
    return max(_LEAST_BUDGET_SECONDS, _BUDGET_STARTS * first)


class Restarts:
    """Counts the short lives in a row."""

    def __init__(self) -> None:
        self.short_lives = 0
        self._served_once = False

    def pause_after(self, served: float | None) -> float | None:
        """Seconds until the next start; None where there should be none: the first start failed, or too many did.

        Args:
            served: seconds for which the engine was ready; None where it never was.
        """
        self._served_once = self._served_once or served is not None
        if served is not None and served >= LASTING_SECONDS:
            self.short_lives = 0
            return 0.0
        self.short_lives += 1
        if not self._served_once or self.short_lives >= _MAX_SHORT_LIVES:
            return None
        return float(_BACKOFF_SECONDS * 2**self.short_lives)
