"""The bounded queue in front of the engine: who may wait, who is refused, and when to come back. Called by `reception`.

What waits is known in two places. The engine counts what it has received; its numbers are as old as its last step. The
gateway knows what it has let in since. `Backpressure` adds the two without counting a request twice: a request is taken
as part of the engine's numbers once two steps were reported after its submission, since the first of them may have
begun before.

A full queue is shared by weight, its places and its prompt tokens alike: see `shares`. A request that comes to a full
queue is prepared where others would give way to it, and they do when it is submitted: nobody loses a place to a request
that is refused after all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic

from paceline_server.config import BackpressureConfig, TenantConfig
from paceline_server.engine.status import EngineStats
from paceline_server.errors import Overloaded
from paceline_server.gateway.shares import Claim, Ticket, giving_way

_STEPS_UNTIL_COUNTED = 2
_SMOOTHING = 0.1  # weight of the newest gap between two starts
_RETRY_AFTER_BOUNDS = (1.0, 60.0)


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
        return self._waiting(self._tickets)

    def require_room(self, tenant: TenantConfig) -> None:
        """Look before a body is read whether its request will find a place, as far as can be known by then.

        Raises:
            Overloaded: as `enter` does.
        """
        self._has_place(tenant)

    @contextmanager
    def enter(self, tenant: TenantConfig, lose: Callable[[], None]) -> Iterator[Ticket]:
        """Take a place in the queue, or lay claim to another tenant's; it is given back at the start, or on leaving.

        Args:
            lose: called at most once, when the place is another tenant's: the request has to be ended then.

        Raises:
            Overloaded: as many requests wait as may, and no tenant holds more places for its weight than this one.
        """
        ticket = Ticket(tenant.name, tenant.weight, lose, placed=self._has_place(tenant))
        self._tickets[ticket] = None
        try:
            yield ticket
        finally:
            self._tickets.pop(ticket, None)
            if not self._tickets:
                self._last_start = None

    def lost(self) -> Overloaded:
        """The refusal of a request that has lost its place."""
        return self._overloaded("queue_full", "the queue is full, and another tenant has less of it than this one")

    def submit(self, ticket: Ticket, prompt_tokens: int) -> None:
        """Note that the request goes to the engine now; others lose their places if they have to, and only then.

        Raises:
            Overloaded: it has lost its own place, or nobody gives way to it any more; or it would have to wait, its
                prompt with those that wait is over the bound of tokens, and nobody has enough more of them.
        """
        if ticket not in self._tickets:
            raise self.lost()
        losers = self._losers_of_place(ticket)
        losers += self._losers_of_tokens(ticket, prompt_tokens, losers)
        for loser in losers:
            del self._tickets[loser]
            loser.lose()
        ticket.placed, ticket.prompt_tokens, ticket.step = True, prompt_tokens, self._stats().steps

    def started(self, ticket: Ticket) -> None:
        """Note the request's first token. Only while others wait is the time between two the pace of the engine."""
        self._tickets.pop(ticket, None)
        now = self._clock()
        if self._last_start is not None:
            gap = now - self._last_start
            known = self._seconds_per_start
            self._seconds_per_start = gap if known is None else known + _SMOOTHING * (gap - known)
        self._last_start = now if self._tickets and self.waiting else None

    def _has_place(self, tenant: TenantConfig) -> bool:
        """Whether there is a place for the tenant's next request; False where others would give way to it.

        Raises:
            Overloaded: neither.
        """
        excess = self.waiting + 1 - self._config.max_queued_requests
        if excess <= 0:
            return True
        # Earlier claims are met first. The engine's numbers still have those that lost: no more is taken than claimed.
        claims = [one for one in self._tickets if not one.placed]
        own = sum(one.tenant == tenant.name for one in claims)
        self._places_for(Claim(tenant.name, tenant.weight, own + 1), min(excess, len(claims) + 1))
        return False

    def _losers_of_place(self, ticket: Ticket) -> list[Ticket]:
        """Who has to go for the ticket's place; nobody where it has one, or one has become free.

        Raises:
            Overloaded: nobody gives way.
        """
        if ticket.placed or self._waiting(self._placed(ticket)) <= self._config.max_queued_requests:
            return []
        return self._places_for(Claim(ticket.tenant, ticket.weight, 1), excess=1)

    def _places_for(self, claim: Claim, excess: int) -> list[Ticket]:
        losers = giving_way(self._placed(), lambda one: 1, claim, excess)
        if losers is None:
            raise self._overloaded("queue_full", f"{self._config.max_queued_requests} requests are waiting already")
        return losers

    def _losers_of_tokens(self, ticket: Ticket, prompt_tokens: int, gone: list[Ticket]) -> list[Ticket]:
        """Who has to go for the ticket's prompt besides those that are gone for its place; nobody while there is room.

        Raises:
            Overloaded: nobody gives way.
        """
        limit, placed = self._config.max_queued_tokens, self._placed(ticket)
        tokens = self._stats().waiting_tokens + sum(one.prompt_tokens for one in self._unseen(placed)) + prompt_tokens
        if limit is None or tokens <= limit or not self._waiting(placed):
            return []
        # The engine's numbers still have those that lost: no more is taken than the newcomer brings.
        excess = min(tokens - limit, prompt_tokens) - sum(one.prompt_tokens for one in gone)
        claim = Claim(ticket.tenant, ticket.weight, prompt_tokens)
        staying = [one for one in placed if one not in gone]
        losers = giving_way(staying, lambda one: one.prompt_tokens, claim, excess)
        if losers is None or prompt_tokens > limit:
            raise self._overloaded("queued_tokens", f"the waiting prompts have as many tokens as they may ({limit})")
        return losers

    def _placed(self, newcomer: Ticket | None = None) -> list[Ticket]:
        """Requests that have a place, the newcomer among them."""
        return [one for one in self._tickets if one.placed or one is newcomer]

    def _unseen(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Requests that the engine's numbers need not contain yet."""
        steps = self._stats().steps
        return [one for one in tickets if one.step is None or steps < one.step + _STEPS_UNTIL_COUNTED]

    def _waiting(self, tickets: Iterable[Ticket]) -> int:
        stats = self._stats()
        free = 0 if stats.waiting else max(0, self._max_running - stats.running)
        return stats.waiting + max(0, len(self._unseen(tickets)) - free)

    def _overloaded(self, code: str, why: str) -> Overloaded:
        """Come back when today's queue has been worked off at the measured pace."""
        low, high = _RETRY_AFTER_BOUNDS
        seconds = self.waiting * (self._seconds_per_start or 0.0)
        return Overloaded(f"overloaded: {why}", code=code, retry_after=min(max(math.ceil(seconds), low), high))
