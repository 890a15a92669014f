"""The bounded queue in front of the engine: who may wait, who is refused, and when to come back. Called by `reception`.

What waits is known in two places. The engine counts what it has received; its numbers are as old as its last step. The
gateway knows what it has let in since. `Backpressure` adds the two without counting a request twice: a request is taken
as part of the engine's numbers once two steps were reported after its submission, since the first of them may have
begun before.

A full queue is shared by weight, its places and its prompt tokens alike. Where a tenant's request finds it full, the
tenant that holds the most by its weight loses its newest request to it, unless that is its own or one that has no more
than the newcomer's would then have. So none is kept from its share by what others send, while a tenant that is alone
may have all of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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


@dataclass(frozen=True, slots=True)
class Claim:
    """What a tenant's newcomer asks of the queue: places, or prompt tokens."""

    tenant: str
    weight: float
    amount: int


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
        self._losers_of_places(tenant)

    @contextmanager
    def enter(self, tenant: TenantConfig, lose: Callable[[], None]) -> Iterator[Ticket]:
        """Take a place in the queue; it is given back when the request starts, or on leaving.

        Args:
            lose: called at most once, when the place is another tenant's: the request has to be ended then.

        Raises:
            Overloaded: as many requests wait as may, and no tenant holds more places for its weight than this one.
        """
        self._dismiss(self._losers_of_places(tenant))
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
        return self._overloaded("queue_full", "the queue is full, and another tenant has less of it than this one")

    def submit(self, ticket: Ticket, prompt_tokens: int) -> None:
        """Note that the request goes to the engine now.

        Raises:
            Overloaded: it would have to wait, its prompt with those that wait is over the bound of tokens, and nobody
                has enough more of them for its weight.
        """
        ticket.prompt_tokens = prompt_tokens
        self._dismiss(self._losers_of_tokens(ticket))
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

    def _losers_of_places(self, tenant: TenantConfig) -> list[Ticket]:
        """Who has to go for the tenant's next request; nobody while there is room.

        Raises:
            Overloaded: nobody has to.
        """
        if self.waiting < self._config.max_queued_requests:
            return []
        losers = _losers(self._tickets, lambda one: 1, Claim(tenant.name, tenant.weight, 1), excess=1)
        if not losers:
            raise self._overloaded("queue_full", f"{self._config.max_queued_requests} requests are waiting already")
        return losers

    def _losers_of_tokens(self, ticket: Ticket) -> list[Ticket]:
        """Who has to go for the ticket's prompt; nobody while there is room for its tokens.

        Raises:
            Overloaded: nobody has to.
        """
        limit, unseen = self._config.max_queued_tokens, self._unseen()
        tokens = self._stats().waiting_tokens + sum(one.prompt_tokens for one in unseen)
        if limit is None or tokens <= limit or not self._waiting(unseen):
            return []
        # The engine's numbers still have those that lost: no more is taken than the newcomer brings.
        excess = min(tokens - limit, ticket.prompt_tokens)
        others = [one for one in self._tickets if one is not ticket]
        claim = Claim(ticket.tenant, ticket.weight, ticket.prompt_tokens)
        losers = _losers(others, lambda one: one.prompt_tokens, claim, excess)
        if not losers or ticket.prompt_tokens > limit:
            raise self._overloaded("queued_tokens", f"the waiting prompts have as many tokens as they may ({limit})")
        return losers

    def _dismiss(self, losers: list[Ticket]) -> None:
        for loser in losers:
            del self._tickets[loser]
            loser.lose()

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


def _losers(line: Iterable[Ticket], size: Callable[[Ticket], int], claim: Claim, excess: int) -> list[Ticket]:
    """The requests that give up `excess` for a claim: each the newest of the tenant that holds the most by its weight.

    Args:
        line: those that have something, oldest first, without the newcomer.
        size: what one of them has.

    Returns:
        Nobody, where a tenant would have to give that has no more by its weight than the claimant would then have.
    """
    staying = [one for one in line if size(one)]
    held: Counter[str] = Counter()
    for one in staying:
        held[one.tenant] += size(one)
    claimed = (held[claim.tenant] + claim.amount) / claim.weight
    losers: list[Ticket] = []
    while excess > 0:
        newest = {one.tenant: one for one in staying}.values()
        most = max(newest, key=lambda one: held[one.tenant] / one.weight, default=None)
        if most is None or held[most.tenant] / most.weight <= claimed:
            return []
        staying.remove(most)
        losers.append(most)
        held[most.tenant] -= size(most)
        excess -= size(most)
    return losers
