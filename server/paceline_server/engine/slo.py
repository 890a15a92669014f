"""The `slo` line: fair shares between tenants, tiers, deadlines, and ageing. The default policy.

Who enters next:

1. Sequences that were preempted, oldest first: they hold a client in the middle of its answer.
2. The tenant that has used least (`fairness`). A more urgent tier gives a head start of some tokens: an interactive
   burst goes before another tenant's batch work, but only so far. Of tenants that are even, the one with the earliest
   deadline.
3. Of the tenant's sequences one of the most urgent tier: interactive, standard, batch.
4. In the tier the one with the earliest deadline for its first token (arrival plus the tier's target, or the request's
   own timeout if that is less) of those that can still be in time; each fourth time one that is late. Among equals, due
   at about the same time, the one of whose prompt most is cached (`preference`).

Nobody starves. A tenant that is passed over has the smallest counter soon, and inside a tenant (`tenant_line`) what is
overdue gets each fourth turn, whatever its tier.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline_server.engine.fairness import CREDIT, QUANTUM, Slots, TokenCounters
from paceline_server.engine.heap import LazyHeap
from paceline_server.engine.interface import Tier
from paceline_server.engine.preference import CachedTokens, prefer_cached
from paceline_server.engine.queue import Arrivals, Backlog, spared
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.tenant_line import HEAD_STARTS, RANKS, TIERS, TenantLine

_PRESSING = 0.75  # share of the time to its first token after which somebody should make room for a request


class SloLine(Arrivals):
    """Implements `WaitingLine`.

    Args:
        ttft_targets: seconds to the first token that each tier is held to.
        promote_after: seconds that a sequence may be late for each tier above its own before it is overdue.
        cached_tokens: looks into the prefix cache.
    """

    def __init__(self, ttft_targets: Mapping[Tier, float], promote_after: float, cached_tokens: CachedTokens) -> None:
        super().__init__()
        self._ttft_targets = ttft_targets
        self._promote_after = promote_after
        self._cached_tokens = cached_tokens
        self._counters = TokenCounters()
        self._floor = 0.0  # counter of the tenant that was served last: newcomers start there when nobody waits
        self._slots = Slots()
        self._resumed: LazyHeap[float, Sequence] = LazyHeap()
        self._lines: dict[str, TenantLine] = {}
        self._turns: LazyHeap[tuple[int, float], str] = LazyHeap()  # tenants by whose turn it is

    def push(self, sequence: Sequence, now: float) -> None:
        """Add a new sequence; a tenant of which nothing waited is lifted to those that wait."""
        tenant = sequence.request.tenant
        if tenant not in self._lines:
            self._counters.enter(tenant, self._smallest(now), self._lines.__contains__)
        self._slots.note(tenant, sequence.request.weight, now)
        self._enter(sequence, now)

    def put_back(self, sequence: Sequence, now: float) -> None:
        """Return a sequence that was taken; its tenant keeps what it had saved up."""
        self._slots.give_back(sequence.request.tenant)
        self._enter(sequence, now)

    def _enter(self, sequence: Sequence, now: float) -> None:
        self._note_entry(sequence)
        if sequence.preemptions:
            self._resumed.push(sequence.request_id, 0.0, sequence, sequence.number)
        else:
            self._place(sequence, now)

    def take(self, now: float, *, scarce: bool = False, owed: Sequence | None = None) -> Sequence | None:
        """Take out the sequence that should enter next, or None.

        Args:
            scarce: few slots are left; nobody enters if the tenant whose turn it is holds most of the slots already.
            owed: goes before all but those that were preempted, unless the last slots are kept from its tenant.
        """
        resumed = self._resumed.first()
        if resumed is not None:
            return self._hand_out(resumed[1], now)
        if owed is not None and self._still_waits(owed) and self._may_enter(owed.request.tenant, now, scarce):
            return self._hand_out(owed, now)
        tenant = self._next_tenant(now)
        if tenant is None or not self._may_enter(tenant, now, scarce):
            return None
        return self._hand_out(prefer_cached(self._lines[tenant].choose(now), self._cached_tokens), now)

    def take_pressing(self, now: float) -> Sequence | None:
        """Take out the first in time of the tenant whose turn it is, if most of its time to the first token is gone.

        None while something waits that was preempted and has made room before, or is as urgent: it is back first.
        """
        tenant = self._next_tenant(now)
        sequence = None if tenant is None else self._lines[tenant].first_in_time(now)
        if sequence is None or now < sequence.arrival + _PRESSING * (self._deadline(sequence) - sequence.arrival):
            return None
        rank = self.rank(sequence)
        if any(one.yields or self.rank(one) <= rank for one in self._resumed):
            return None
        return self._hand_out(sequence, now)

    def remove(self, request_id: str) -> Sequence | None:
        """Take a sequence out, wherever it stands."""
        sequence = self._note_exit(request_id)
        if sequence is not None and self._resumed.remove(request_id) is None:
            self._leave(sequence)
        return sequence

    def charge(self, sequence: Sequence, cost: float) -> None:
        """Book what a sequence has used to its tenant's counter."""
        self._counters.charge(sequence.request.tenant, cost, sequence.request.weight)

    def favours(self, sequence: Sequence, now: float) -> bool:
        """Whether its tenant has used less than the one whose turn it is."""
        tenant = self._next_tenant(now)
        return tenant is not None and self._counters.level(sequence.request.tenant) < self._counters.level(tenant)

    def rank(self, sequence: Sequence) -> float:
        """That of its tier."""
        return spared(sequence, RANKS[sequence.request.tier])

    def note_end(self, sequence: Sequence) -> None:
        """A sequence that was taken is gone: its tenant holds a slot less."""
        self._slots.give_back(sequence.request.tenant)

    def ahead_of(self, sequence: Sequence, now: float) -> Backlog:
        """What would go before a sequence if it were pushed now, newcomers not counted: O(tenants).

        Its own tenant's sequences do that are more urgent or come first. Another tenant is served until it has used as
        much as the own one will have when the sequence's turn comes.
        """
        tenant, rank = sequence.request.tenant, RANKS[sequence.request.tier]
        own = self._lines.get(tenant)
        due = own.ahead_of(rank, now) if own else Backlog()
        start = self._counters.used(tenant) if own else max(self._counters.used(tenant), self._smallest(now) - CREDIT)
        turn = start + due.tokens / sequence.request.weight - HEAD_STARTS[rank] * QUANTUM
        others = (
            line.served_until(turn - self._counters.used(name)) for name, line in self._lines.items() if name != tenant
        )
        return sum((Backlog.of(self._resumed), due, *others), Backlog(overtaken_by=TIERS[:rank]))

    def _may_enter(self, tenant: str, now: float, scarce: bool) -> bool:
        return not scarce or self._slots.may_take_last(tenant, now, self._lines.__contains__)

    def _hand_out(self, sequence: Sequence, now: float) -> Sequence | None:
        tenant = sequence.request.tenant
        if not sequence.preemptions:
            self._floor = max(self._floor, self._counters.used(tenant))
        self._slots.take(tenant, sequence.request.weight, now)
        return self.remove(sequence.request_id)

    def _place(self, sequence: Sequence, now: float) -> None:
        tenant = sequence.request.tenant
        line = self._lines.setdefault(tenant, TenantLine(self._promote_after))
        line.add(sequence, self._deadline(sequence), now)
        self._turns.push(tenant, self._turn(tenant, now), tenant)

    def _leave(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        line = self._lines[tenant]
        line.remove(sequence)
        if not len(line):
            del self._lines[tenant]
            self._turns.remove(tenant)

    def _deadline(self, sequence: Sequence) -> float:
        request = sequence.request
        target = self._ttft_targets[request.tier]
        return sequence.arrival + (target if request.timeout is None else min(target, request.timeout))

    def _smallest(self, now: float) -> float:
        """Counter that a newcomer is lifted to: that of the tenant whose turn it is."""
        tenant = self._next_tenant(now)
        return self._floor if tenant is None else self._counters.used(tenant)

    def _next_tenant(self, now: float) -> str | None:
        """Whose turn it is. Turns only move back while nobody looks, so the first one that is up to date is next."""
        while (first := self._turns.first()) is not None:
            turn, tenant = first
            current = self._turn(tenant, now)
            if turn == current:
                return tenant
            self._turns.push(tenant, current, tenant)
        return None

    def _turn(self, tenant: str, now: float) -> tuple[int, float]:
        line = self._lines[tenant]
        return self._counters.level(tenant) - line.head_start, line.deadline(now)
