"""The `slo` line: tiers, deadlines inside a tier, fair shares between tenants, and ageing. The default policy.

Who enters next:

1. The most urgent tier that has somebody: interactive, standard, batch.
2. In it, sequences that were preempted, oldest first: they hold a client in the middle of its answer.
3. Then the tenant that has used least (`fairness`), and of tenants that are even the one whose first sequence has the
   earliest deadline for its first token: arrival plus the tier's target, or the request's own timeout if that is less.
4. Of the tenant's sequences the one with the earliest deadline among those that can still be in time; each fourth
   time the one that is late by most. Under overload plain earliest-deadline-first serves nobody but the late, and so
   makes everybody late.

Nobody starves. A sequence rises by one tier whenever it has waited `promote_after` seconds, so it reaches the first
tier; there a tenant that is passed over has the smallest counter soon, and of a tenant's sequences every fourth is the
one that is late by most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from paceline_server.engine.fairness import TokenCounters
from paceline_server.engine.heap import LazyHeap
from paceline_server.engine.interface import Tier
from paceline_server.engine.queue import Backlog
from paceline_server.engine.sequence import Sequence

_IN_TIME_BY_LATE = 3  # sequences that are served in time for each one that is late already
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
            sequence = tier.first(now)
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
        parts.append(self._tiers[rank].ahead_of(sequence, now))
        return Backlog(
            requests=sum(part.requests for part in parts),
            tokens=sum(part.tokens for part in parts),
            overtaken_by=_TIERS[:rank],
        )

    def _add(self, sequence: Sequence, now: float, *, lift: bool) -> None:
        rank = self._rank(sequence, now)
        self._tiers[rank].add(sequence, self._deadline(sequence), now, lift=lift)
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
            self._tiers[rank - 1].add(sequence, self._deadline(sequence), now, lift=True)
            self._ranks[sequence.request_id] = rank - 1
            self._ageing.remove(sequence.request_id)
            if rank > 1:
                self._ageing.push(sequence.request_id, due + self._promote_after, sequence, sequence.number)


class _TenantLine:
    """The sequences of one tenant in one tier: those that can still be in time, and those that are late."""

    def __init__(self) -> None:
        self._in_time: LazyHeap[float, Sequence] = LazyHeap()
        self._late: LazyHeap[float, Sequence] = LazyHeap()
        self._late_tokens = 0
        self._since_late = 0  # taken in time since a late one was
        self.tokens = 0  # of all, to compute
        self.weight = 1.0  # of the tenant, as its latest request said

    def __len__(self) -> int:
        return len(self._in_time) + len(self._late)

    def add(self, sequence: Sequence, deadline: float) -> None:
        """Add a sequence."""
        self._in_time.push(sequence.request_id, deadline, sequence, sequence.number)
        self.tokens += sequence.num_tokens
        self.weight = sequence.request.weight

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that stands here."""
        if self._in_time.remove(sequence.request_id) is None:
            self._late.remove(sequence.request_id)
            self._late_tokens -= sequence.num_tokens
        self.tokens -= sequence.num_tokens

    def deadline(self, now: float) -> float:
        """The earliest that can still be met; infinite where all are late. It grows but for `add`."""
        while (first := self._in_time.first()) is not None and first[0] < now:
            deadline, sequence = first
            self._in_time.remove(sequence.request_id)
            self._late.push(sequence.request_id, deadline, sequence, sequence.number)
            self._late_tokens += sequence.num_tokens
        return inf if first is None else first[0]

    def first(self, now: float) -> Sequence:
        """Whose turn it is."""
        self.deadline(now)
        in_time, late = self._in_time.first(), self._late.first()
        first = late if in_time is None or (late is not None and self._since_late >= _IN_TIME_BY_LATE) else in_time
        assert first is not None, "a tenant without sequences is in the line"
        return first[1]

    def note_taken(self, sequence: Sequence) -> None:
        """A sequence is about to be taken because its turn has come."""
        self._since_late = 0 if sequence.request_id in self._late else self._since_late + 1

    def ahead_of_newcomer(self) -> Backlog:
        """What goes before one that comes now and can be in time."""
        in_time = len(self._in_time)
        late = min(len(self._late), in_time // _IN_TIME_BY_LATE)
        late_tokens = round(self._late_tokens * late / len(self._late)) if late else 0
        return Backlog(in_time + late, self.tokens - self._late_tokens + late_tokens)


class _TierLine:
    """One tier: its preempted sequences, and its tenants by what they have used."""

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._resumed: LazyHeap[float, Sequence] = LazyHeap()
        self._tenants: LazyHeap[tuple[int, float], str] = LazyHeap()
        self._lines: dict[str, _TenantLine] = {}
        self._floor = 0.0  # counter of the tenant that was served last: newcomers start there when nobody waits

    def add(self, sequence: Sequence, deadline: float, now: float, *, lift: bool) -> None:
        """Add a sequence; `lift` its tenant to those that wait already, if nothing of it waits here."""
        tenant = sequence.request.tenant
        if sequence.preemptions:
            self._resumed.push(sequence.request_id, 0.0, sequence, sequence.number)
            return
        line = self._lines.get(tenant)
        if line is None:
            if lift:
                self._counters.lift(tenant, self._smallest(now))
            line = self._lines[tenant] = _TenantLine()
        line.add(sequence, deadline)
        self._tenants.push(tenant, self._key(tenant, now), tenant)

    def first(self, now: float) -> Sequence | None:
        """The sequence that enters next from this tier, or None; it stays."""
        resumed = self._resumed.first()
        if resumed is not None:
            return resumed[1]
        tenant = self._first_tenant(now)
        return None if tenant is None else self._lines[tenant].first(now)

    def note_taken(self, sequence: Sequence) -> None:
        """Remember how far the tenant was that is served now."""
        tenant = sequence.request.tenant
        self._floor = max(self._floor, self._counters.used(tenant))
        if sequence.request_id not in self._resumed:
            self._lines[tenant].note_taken(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that stands here."""
        if self._resumed.remove(sequence.request_id) is not None:
            return
        tenant = sequence.request.tenant
        line = self._lines[tenant]
        line.remove(sequence)
        if not len(line):
            del self._lines[tenant]
            self._tenants.remove(tenant)

    def all(self) -> Backlog:
        """Everything that stands here."""
        resumed = sum(sequence.num_tokens for sequence in self._resumed)
        return Backlog(
            len(self._resumed) + sum(len(line) for line in self._lines.values()),
            resumed + sum(line.tokens for line in self._lines.values()),
        )

    def ahead_of(self, sequence: Sequence, now: float) -> Backlog:
        """What goes before a new sequence of this tier.

        Its own tenant's sequences do that can be in time. Another tenant is served until it has used as much as the own
        one will have when the sequence's turn comes.
        """
        tenant, weight = sequence.request.tenant, sequence.request.weight
        own = self._lines.get(tenant)
        due = own.ahead_of_newcomer() if own else Backlog(0, 0)
        start = self._counters.used(tenant)
        turn = (start if own else max(start, self._smallest(now))) + due.tokens / weight
        requests = len(self._resumed) + due.requests
        tokens = sum(one.num_tokens for one in self._resumed) + due.tokens
        for name, line in self._lines.items():
            if name != tenant:
                room = max(0.0, turn - self._counters.used(name)) * line.weight
                share = min(1.0, room / line.tokens)
                tokens += round(share * line.tokens)
                requests += round(share * len(line))
        return Backlog(requests, tokens)

    def waits(self, tenant: str) -> bool:
        """Whether something of a tenant waits here."""
        return tenant in self._lines

    def _smallest(self, now: float) -> float:
        """Counter that a newcomer is lifted to: that of the tenant whose turn it is."""
        tenant = self._first_tenant(now)
        return self._floor if tenant is None else self._counters.used(tenant)

    def _first_tenant(self, now: float) -> str | None:
        """Whose turn it is. Keys only grow while nobody looks, so the first one that is up to date is the smallest."""
        while (first := self._tenants.first()) is not None:
            key, tenant = first
            current = self._key(tenant, now)
            if key == current:
                return tenant
            self._tenants.push(tenant, current, tenant)
        return None

    def _key(self, tenant: str, now: float) -> tuple[int, float]:
        return self._counters.level(tenant), self._lines[tenant].deadline(now)
