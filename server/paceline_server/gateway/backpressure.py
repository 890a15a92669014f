"""The bounded queue in front of the engine: who may wait, who is refused, and when to come back. Called by `reception`.

What waits is known in two places. The engine counts what it has received; its numbers are as old as its last step. The
gateway knows what it has let in since. `Backpressure` adds the two without counting a request twice: a request is taken
as part of the engine's numbers once two steps were reported after its submission, since the first of them may have
begun before.

A full queue is shared by weight. Where a tenant's request finds it full, the tenant that holds the most places by its
weight loses its newest one to it, unless that is no other tenant than its own or one that would then have fewer. So
none is kept from its share by what others send, while a tenant that is alone may have all places.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from paceline_server.config import BackpressureConfig, TenantConfig
from paceline_server.engine.status import EngineStats
from paceline_server.errors import Overloaded

_STEPS_UNTIL_COUNTED = 2
_SMOOTHING = 0.1  # weight of the newest gap between two starts
_RETRY_AFTER_BOUNDS = (1.0, 60.0)


@dataclass(slots=True, eq=False)
class Ticket:
    """One request between its arrival and its first token.

    Attributes:
        tenant: whose it is; `weight`: the share it has.
        lose: ends it, where its place goes to another tenant's.
        prompt_tokens: 0 until the prompt is tokenised.
        step: the engine's step count at submission; None before.
    """

    tenant: str
    weight: float
    lose: Callable[[], None]
    prompt_tokens: int = 0
    step: int | None = None


class Backpressure:
    """Lets requests in while the queue has room.

    Args:
        max_running: requests that the engine runs together; that many may come at once when it is idle.
        stats: the engine's newest numbers.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: BackpressureConfig,
        max_running: int,
        stats: Callable[[], EngineStats],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._config = config
        self._max_running = max_running
        self._stats = stats
        self._clock = clock
        self._tickets: dict[Ticket, None] = {}  # a set that keeps their order: oldest first
        self._last_start: float | None = None  # since when something has waited all the time
        self._seconds_per_start: float | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait, as well as can be known now."""
        return self._waiting(self._unseen())

    def require_room(self, tenant: TenantConfig) -> None:
        """Look before a body is read whether its request will find a place, as far as can be known by then.

        Raises:
            Overloaded: as `enter` does.
        """
        self._loser_to(tenant)

    @contextmanager
    def enter(self, tenant: TenantConfig, lose: Callable[[], None]) -> Iterator[Ticket]:
        """Take a place in the queue; it is given back when the request starts, or on leaving.

        Args:
            lose: called at most once, when the place is another tenant's: the request has to be ended then.

        Raises:
            Overloaded: as many requests wait as may, and no tenant holds more places for its weight than this one.
        """
        loser = self._loser_to(tenant)
        if loser is not None:
            del self._tickets[loser]
            loser.lose()
        ticket = Ticket(tenant.name, tenant.weight, lose)
        self._tickets[ticket] = None
        try:
            yield ticket
        finally:
            self._tickets.pop(ticket, None)
            if not self._tickets:
                self._last_start = None

    def lost(self) -> Overloaded:
        """The refusal of a request that has lost its place."""
        return self._overloaded("queue_full", "the queue is full, and another tenant has fewer places than this one")

    def submit(self, ticket: Ticket, prompt_tokens: int) -> None:
        """Note that the request goes to the engine now.

        Raises:
            Overloaded: it would have to wait, and its prompt with those that wait is over the bound of tokens.
        """
        limit = self._config.max_queued_tokens
        ticket.prompt_tokens = prompt_tokens
        unseen = self._unseen()
        tokens = self._stats().waiting_tokens + sum(one.prompt_tokens for one in unseen)
        if limit is not None and tokens > limit and self._waiting(unseen) > 0:
            raise self._overloaded("queued_tokens", f"the waiting prompts have as many tokens as they may ({limit})")
        ticket.step = self._stats().steps

    def started(self, ticket: Ticket) -> None:
        """Note the request's first token. Only while others wait is the time between two the pace of the engine."""
        self._tickets.pop(ticket, None)
        now = self._clock()
        if self._last_start is not None:
            gap = now - self._last_start
            known = self._seconds_per_start
            self._seconds_per_start = gap if known is None else known + _SMOOTHING * (gap - known)
        self._last_start = now if self._tickets and self.waiting else None

    def _loser_to(self, tenant: TenantConfig) -> Ticket | None:
        """Who has to go for the tenant's next request; nobody while there is room.

        Raises:
            Overloaded: nobody has to.
        """
        if self.waiting < self._config.max_queued_requests:
            return None
        held = Counter(one.tenant for one in self._tickets)
        newest = {one.tenant: one for one in self._tickets}.values()
        most = max(newest, key=lambda one: held[one.tenant] / one.weight, default=None)
        if most is None or held[most.tenant] / most.weight <= (held[tenant.name] + 1) / tenant.weight:
            raise self._overloaded("queue_full", f"{self._config.max_queued_requests} requests are waiting already")
        return most

    def _unseen(self) -> list[Ticket]:
        """Requests that the engine's numbers need not contain yet."""
        steps = self._stats().steps
        return [one for one in self._tickets if one.step is None or steps < one.step + _STEPS_UNTIL_COUNTED]

    def _waiting(self, unseen: list[Ticket]) -> int:
        stats = self._stats()
        free = 0 if stats.waiting else max(0, self._max_running - stats.running)
        return stats.waiting + max(0, len(unseen) - free)

    def _overloaded(self, code: str, why: str) -> Overloaded:
        """Come back when today's queue has been worked off at the measured pace."""
        low, high = _RETRY_AFTER_BOUNDS
        seconds = self.waiting * (self._seconds_per_start or 0.0)
        return Overloaded(f"overloaded: {why}", code=code, retry_after=min(max(math.ceil(seconds), low), high))
