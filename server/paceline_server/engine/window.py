"""How long an idle engine waits for company before it starts a batch.

Waiting makes the first request later and the batch larger. It pays only where somebody is likely to come: the window
follows the arrivals, and is 0 when traffic is low. The step loop (`core`) and the embedder ask it when nothing runs; an
engine that runs never waits, its batch gathers by itself meanwhile. Pure: time is a parameter.
"""

from __future__ import annotations

_SMOOTHING = 0.1  # weight of the newest gap in the mean: a memory of about ten arrivals


class DelayWindow:
    """The delay in force.

    It is the time in which the free places of a batch are expected to fill, at most the cap; and 0 where not even one
    arrival is expected within the cap.

    Args:
        cap: seconds that anybody may be made to wait; 0 never waits.
        places: requests in a full batch.
        adaptive: follow the arrivals; else the window is always the cap.
    """

    def __init__(self, cap: float, places: int, *, adaptive: bool = True) -> None:
        self._cap = cap
        self._places = places
        self._adaptive = adaptive
        self._gap: float | None = None  # mean seconds between two arrivals, exponentially weighted
        self._last: float | None = None

    def note(self, now: float) -> None:
        """Count an arrival."""
        if self._last is not None:
            gap = max(0.0, now - self._last)
            self._gap = gap if self._gap is None else self._gap + _SMOOTHING * (gap - self._gap)
        self._last = now

    def seconds(self, now: float) -> float:
        """The window in force."""
        if not self._adaptive:
            return self._cap
        if self._gap is None or self._last is None:
            return 0.0
        gap = max(self._gap, now - self._last)  # silence is news too
        return 0.0 if gap > self._cap else min(self._cap, gap * (self._places - 1))

    def due(self, oldest_arrival: float, now: float, *, full: bool) -> float:
        """When the batch of those that wait should start, on the clock of `now`; never later than the cap allows.

        Args:
            oldest_arrival: of those that wait.
            full: nobody else would fit.
        """
        return oldest_arrival if full else oldest_arrival + self.seconds(now)
