"""How long a container that keeps ending waits before it is started again. Pure; called by the kubelet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackOff:
    """The kubelet's rule: at once the first time, then `base` seconds doubling to `cap`.

    It starts over after a run of twice the cap. The kubelet's own numbers are 10 s and 300 s; here someone sits in
    front of the terminal and nobody else shares the machine, so they are 1 s and 60 s.
    """

    base: float = 1.0
    cap: float = 60.0

    def next(self, previous: float | None, ran: float) -> float:
        """Seconds to wait after a run of `ran` seconds. `previous` is the wait before it, None for the first run."""
        if previous is None or ran >= 2 * self.cap:
            return 0.0
        return min(max(self.base, 2 * previous), self.cap)
