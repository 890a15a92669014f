"""The `slo` line: tiers, deadlines inside a tier, fair shares between tenants, and ageing. The default policy.

Who enters next:

1. The most urgent tier that has somebody: interactive, standard, batch.
2. In it, sequences that were preempted, oldest first: they hold a client in the middle of its answer.
3. Then the tenant that has used least (`fairness`), and of tenants that are even the one whose first sequence has the
   earliest deadline for its first token: arrival plus the tier's target, or the request's own timeout if that is less.
4. Of the tenant's sequences the one with the earliest deadline.

Nobody starves. A sequence rises by one tier whenever it has waited `promote_after` seconds, so it reaches the first
tier, and there only so many can pass it: its deadline is fixed while those of newcomers grow, and a tenant that is
passed over has the smallest counter soon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline_server.engine.fairness import TokenCounters
from paceline_server.engine.heap import LazyHeap
from paceline_server.engine.interface import Tier
from paceline_server.engine.queue import Backlog
from paceline_server.engine.sequence import Sequence

_TIERS = tuple(Tier)
_RANKS = {tier: rank for rank, tier in enumerate(_TIERS)}


class SloLine:
    """Implements `WaitingLine`.

    Args:
        ttft_targets: seconds to the first token that each tier is held to.
        promote_after: seconds of waiting after which a sequence rises by one tier.
    """

    def __init__(self, ttft_targets: Mapping[Tier, float], promote_after: float) -> None:
        self._ttft_targets = ttft_targets
        self._promote_after = promote_after
        self._counters = TokenCounters()
        self._tiers = [_TierLine(self._counters) for _ in _TIERS]
        self._ranks: dict[str, int] = {}  # the tier in which a waiting sequence stands
        self._ageing: LazyHeap[float, Sequence] = LazyHeap()  # by the time of the next rise
        self._by_arrival: LazyHeap[float, Sequence] = LazyHeap()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_arrival)

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting sequences that have to be computed."""
        return self._tokens

    @property
    def oldest_arrival(self) -> float | None:
        """When the sequence arrived that has waited longest."""
        first = self._by_arrival.first()
        return None if first is None else first[0]

    def push(self, sequence: Sequence, now: float) -> None:
        """Add a new sequence; its tenant is lifted if nothing of it waits in that tier."""
        self._add(sequence, now, lift=True)
        self._counters.forget_idle(lambda tenant: any(tier.waits(tenant) for tier in self._tiers))

    def put_back(self, sequence: Sequence, now: float) -> None:
        """Return a sequence that was taken; its tenant keeps what it had saved up."""
        self._add(sequence, now, lift=False)

    def take(self, now: float) -> Sequence | None:
        """Take out the sequence that should enter next, or None."""
        self._promote(now)
        for tier in self._tiers:
            sequence = tier.first()
            if sequence is not None:
                tier.note_taken(sequence)
                return self.remove(sequence.request_id)
        return None

    def remove(self, request_id: str) -> Sequence | None:
        """Take a sequence out, wherever it stands."""
        sequence = self._by_arrival.remove(request_id)
        if sequence is not None:
            self._tiers[self._ranks.pop(request_id)].remove(sequence)
            self._ageing.remove(request_id)
            self._tokens -= sequence.num_tokens
        return sequence

    def charge(self, sequence: Sequence, cost: float) -> None:
        """Book what a sequence has used to its tenant's counter."""
        self._counters.charge(sequence.request.tenant, cost, sequence.request.weight)

    def ahead_of(self, sequence: Sequence, now: float) -> Backlog:
        """What would go before a sequence if it were pushed now, newcomers of its own tier not counted: O(tenants)."""
        self._promote(now)
        rank = self._rank(sequence, now)
        parts = [tier.all() for tier in self._tiers[:rank]]
        parts.append(self._tiers[rank].ahead_of(sequence))
        return Backlog(
            requests=sum(part.requests for part in parts),
            tokens=sum(part.tokens for part in parts),
            overtaken_by=_TIERS[:rank],
        )

    def _add(self, sequence: Sequence, now: float, *, lift: bool) -> None:
        rank = self._rank(sequence, now)
        self._tiers[rank].add(sequence, self._deadline(sequence), lift=lift)
        self._ranks[sequence.request_id] = rank
        self._by_arrival.push(sequence.request_id, sequence.arrival, sequence, sequence.number)
        self._tokens += sequence.num_tokens
        if rank > 0:
            self._ageing.push(sequence.request_id, self._next_rise(sequence, rank), sequence, sequence.number)

    def _rank(self, sequence: Sequence, now: float) -> int:
        risen = int((now - sequence.arrival) / self._promote_after)
        return max(0, _RANKS[sequence.request.tier] - risen)

    def _next_rise(self, sequence: Sequence, rank: int) -> float:
        risen = _RANKS[sequence.request.tier] - rank
        return sequence.arrival + (risen + 1) * self._promote_after

    def _deadline(self, sequence: Sequence) -> float:
        request = sequence.request
        target = self._ttft_targets[request.tier]
        return sequence.arrival + (target if request.timeout is None else min(target, request.timeout))

    def _promote(self, now: float) -> None:
        """Let everybody rise whose time has come; each rises at most once a tier."""
        while (first := self._ageing.first()) is not None and first[0] <= now:
            due, sequence = first
            rank = self._ranks[sequence.request_id]
            self._tiers[rank].remove(sequence)
            self._tiers[rank - 1].add(sequence, self._deadline(sequence), lift=True)
            self._ranks[sequence.request_id] = rank - 1
            self._ageing.remove(sequence.request_id)
            if rank > 1:
                self._ageing.push(sequence.request_id, due + self._promote_after, sequence, sequence.number)


class _TenantLine:
    """The sequences of one tenant in one tier, by deadline; `tokens` are theirs to compute."""

    __slots__ = ("by_deadline", "tokens", "weight")

    def __init__(self) -> None:
        self.by_deadline: LazyHeap[float, Sequence] = LazyHeap()
        self.tokens = 0
        self.weight = 1.0


class _TierLine:
    """One tier: its preempted sequences, and its tenants by what they have used."""

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._resumed: LazyHeap[float, Sequence] = LazyHeap()
        self._tenants: LazyHeap[tuple[int, float], str] = LazyHeap()
        self._lines: dict[str, _TenantLine] = {}
        self._floor = 0.0  # counter of the tenant that was served last: newcomers start there when nobody waits

    def add(self, sequence: Sequence, deadline: float, *, lift: bool) -> None:
        """Add a sequence; `lift` its tenant to those that wait already, if nothing of it waits here."""
        tenant = sequence.request.tenant
        if sequence.preemptions:
            self._resumed.push(sequence.request_id, 0.0, sequence, sequence.number)
            return
        line = self._lines.get(tenant)
        if line is None:
            if lift:
                self._counters.lift(tenant, self._smallest())
            line = self._lines[tenant] = _TenantLine()
        line.by_deadline.push(sequence.request_id, deadline, sequence, sequence.number)
        line.tokens += sequence.num_tokens
        line.weight = sequence.request.weight
        self._tenants.push(tenant, self._key(tenant, line), tenant)

    def first(self) -> Sequence | None:
        """The sequence that enters next from this tier, or None; it stays."""
        resumed = self._resumed.first()
        if resumed is not None:
            return resumed[1]
        tenant = self._first_tenant()
        if tenant is None:
            return None
        first = self._lines[tenant].by_deadline.first()
        assert first is not None, "a tenant without sequences is in the line"
        return first[1]

    def note_taken(self, sequence: Sequence) -> None:
        """Remember how far the tenant was that is served now."""
        self._floor = max(self._floor, self._counters.used(sequence.request.tenant))

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that stands here."""
        if self._resumed.remove(sequence.request_id) is not None:
            return
        tenant = sequence.request.tenant
        line = self._lines[tenant]
        line.by_deadline.remove(sequence.request_id)
        line.tokens -= sequence.num_tokens
        if not line.by_deadline:
            del self._lines[tenant]
            self._tenants.remove(tenant)

    def all(self) -> Backlog:
        """Everything that stands here."""
        resumed = sum(sequence.num_tokens for sequence in self._resumed)
        return Backlog(
            len(self._resumed) + sum(len(line.by_deadline) for line in self._lines.values()),
            resumed + sum(line.tokens for line in self._lines.values()),
        )

    def ahead_of(self, sequence: Sequence) -> Backlog:
        """What goes before a new sequence of this tier.

        Its own tenant's sequences do. Another tenant is served until it has used as much as the own one will have when
        the sequence's turn comes.
        """
        tenant, weight = sequence.request.tenant, sequence.request.weight
        own = self._lines.get(tenant)
        start = self._counters.used(tenant) if own else max(self._counters.used(tenant), self._smallest())
        turn = start + (own.tokens if own else 0) / weight
        requests, tokens = len(self._resumed), sum(one.num_tokens for one in self._resumed)
        for name, line in self._lines.items():
            room = max(0.0, turn - self._counters.used(name)) * line.weight
            share = 1.0 if name == tenant else min(1.0, room / line.tokens)
            tokens += round(share * line.tokens)
            requests += round(share * len(line.by_deadline))
        return Backlog(requests, tokens)

    def waits(self, tenant: str) -> bool:
        """Whether something of a tenant waits here."""
        return tenant in self._lines

    def _smallest(self) -> float:
        """Counter that a newcomer is lifted to: that of the tenant whose turn it is."""
        tenant = self._first_tenant()
        return self._floor if tenant is None else self._counters.used(tenant)

    def _first_tenant(self) -> str | None:
        """Whose turn it is. Keys only ever grow while nobody looks, so the first that is up to date is the smallest."""
        while (first := self._tenants.first()) is not None:
            key, tenant = first
            current = self._key(tenant, self._lines[tenant])
            if key == current:
                return tenant
            self._tenants.push(tenant, current, tenant)
        return None

    def _key(self, tenant: str, line: _TenantLine) -> tuple[int, float]:
        first = line.by_deadline.first()
        assert first is not None, "a tenant without sequences is in the line"
        return self._counters.level(tenant), first[0]
