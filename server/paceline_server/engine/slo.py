"""The `slo` line: fair shares between tenants, tiers, deadlines, and ageing. The default policy.

Who enters next:

1. Sequences that were preempted, oldest first: they hold a client in the middle of its answer.
2. The tenant that has used least (`fairness`). A more urgent tier gives a head start of some tokens: an interactive
   burst goes before another tenant's batch work, but only so far. Of tenants that are even, the one with the earliest
   deadline.
3. Of the tenant's sequences one of the most urgent tier: interactive, standard, batch.
4. In the tier the one with the earliest deadline for its first token (arrival plus the tier's target, or the request's
   own timeout if that is less) of those that can still be in time; each fourth time the one that is late by most. Under
   overload plain earliest-deadline-first serves nobody but the late, and so makes everybody late.

Nobody starves. A tenant that is passed over has the smallest counter soon. Inside a tenant a sequence rises by one tier
whenever it has waited `promote_after` seconds, so it reaches the first tier, where every fourth is the one that is late
by most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from paceline_server.engine.fairness import CREDIT, QUANTUM, Slots, TokenCounters
from paceline_server.engine.heap import LazyHeap
from paceline_server.engine.interface import Tier
from paceline_server.engine.queue import Backlog
from paceline_server.engine.sequence import Sequence

_TIERS = tuple(Tier)
_RANKS = {tier: rank for rank, tier in enumerate(_TIERS)}
_HEAD_STARTS = (32, 16, 0)  # quanta by rank that a tenant may have used more and still go first
_MOVES_A_CALL = 4  # that rise or become late; a hundred thousand of one age must not stop a step
_IN_TIME_BY_LATE = 3  # sequences that are served in time for each one that is late already


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
        self._floor = 0.0  # counter of the tenant that was served last: newcomers start there when nobody waits
        self._slots = Slots()
        self._resumed: LazyHeap[float, Sequence] = LazyHeap()
        self._lines: dict[str, _TenantLine] = {}
        self._turns: LazyHeap[tuple[int, float], str] = LazyHeap()  # tenants by whose turn it is
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
        """Add a new sequence; a tenant of which nothing waited is lifted to those that wait."""
        self._promote(now)  # for each that comes some rise: between the steps, and enough of them
        tenant = sequence.request.tenant
        if tenant not in self._lines:
            self._counters.lift(tenant, self._smallest(now) - CREDIT)
        self._slots.note(tenant, sequence.request.weight, now)
        self._enter(sequence, now)
        self._counters.forget_idle(self._lines.__contains__)

    def put_back(self, sequence: Sequence, now: float) -> None:
        """Return a sequence that was taken; its tenant keeps what it had saved up."""
        self._slots.give_back(sequence.request.tenant)
        self._enter(sequence, now)

    def _enter(self, sequence: Sequence, now: float) -> None:
        self._by_arrival.push(sequence.request_id, sequence.arrival, sequence, sequence.number)
        self._tokens += sequence.num_tokens
        if sequence.preemptions:
            self._resumed.push(sequence.request_id, 0.0, sequence, sequence.number)
        else:
            self._place(sequence, _RANKS[sequence.request.tier], now)  # what is due rises before the next is taken

    def take(self, now: float, *, scarce: bool = False) -> Sequence | None:
        """Take out the sequence that should enter next, or None.

        Args:
            scarce: few slots are left; nobody enters if the tenant whose turn it is holds most of the slots already.
        """
        self._promote(now)
        resumed = self._resumed.first()
        if resumed is not None:
            sequence = resumed[1]
        else:
            tenant = self._next_tenant(now)
            if tenant is None or (scarce and not self._slots.may_take_last(tenant, now, self._lines.__contains__)):
                return None
            self._floor = max(self._floor, self._counters.used(tenant))
            sequence = self._lines[tenant].choose(now)
        self._slots.take(sequence.request.tenant, sequence.request.weight, now)
        return self.remove(sequence.request_id)

    def remove(self, request_id: str) -> Sequence | None:
        """Take a sequence out, wherever it stands."""
        sequence = self._by_arrival.remove(request_id)
        if sequence is not None:
            self._tokens -= sequence.num_tokens
            if self._resumed.remove(request_id) is None:
                self._ageing.remove(request_id)
                self._leave(sequence)
        return sequence

    def charge(self, sequence: Sequence, cost: float) -> None:
        """Book what a sequence has used to its tenant's counter."""
        self._counters.charge(sequence.request.tenant, cost, sequence.request.weight)

    def favours(self, sequence: Sequence, now: float) -> bool:
        """Whether its tenant has used less than the one whose turn it is."""
        tenant = self._next_tenant(now)
        return tenant is not None and self._counters.level(sequence.request.tenant) < self._counters.level(tenant)

    def note_end(self, sequence: Sequence) -> None:
        """A sequence that was taken is gone: its tenant holds a slot less."""
        self._slots.give_back(sequence.request.tenant)

    def ahead_of(self, sequence: Sequence, now: float) -> Backlog:
        """What would go before a sequence if it were pushed now, newcomers not counted: O(tenants).

        Its own tenant's sequences do that are more urgent or come first. Another tenant is served until it has used as
        much as the own one will have when the sequence's turn comes.
        """
        self._promote(now)
        tenant, rank = sequence.request.tenant, _RANKS[sequence.request.tier]
        own = self._lines.get(tenant)
        due = own.ahead_of(rank, now) if own else Backlog(0, 0)
        start = self._counters.used(tenant) if own else max(self._counters.used(tenant), self._smallest(now) - CREDIT)
        turn = start + due.tokens / sequence.request.weight - _HEAD_STARTS[rank] * QUANTUM
        requests = len(self._resumed) + due.requests
        tokens = sum(one.num_tokens for one in self._resumed) + due.tokens
        for name, line in self._lines.items():
            if name != tenant:
                other = line.served_until(turn - self._counters.used(name))
                requests += other.requests
                tokens += other.tokens
        return Backlog(requests, tokens, overtaken_by=_TIERS[:rank])

    def _place(self, sequence: Sequence, rank: int, now: float) -> None:
        tenant = sequence.request.tenant
        line = self._lines.setdefault(tenant, _TenantLine())
        line.add(sequence, rank, self._deadline(sequence))
        self._turns.push(tenant, self._turn(tenant, now), tenant)
        if rank > 0:
            risen = _RANKS[sequence.request.tier] - rank
            due = sequence.arrival + (risen + 1) * self._promote_after
            self._ageing.push(sequence.request_id, due, sequence, sequence.number)

    def _leave(self, sequence: Sequence) -> int:
        """Take a sequence out of its tenant's line; returns the rank that it had."""
        tenant = sequence.request.tenant
        rank = self._lines[tenant].remove(sequence)
        if not len(self._lines[tenant]):
            del self._lines[tenant]
            self._turns.remove(tenant)
        return rank

    def _promote(self, now: float) -> None:
        """Let those rise whose time has come; each rises at most once a tier."""
        for _ in range(_MOVES_A_CALL):
            first = self._ageing.first()
            if first is None or first[0] > now:
                return
            sequence = first[1]
            self._ageing.remove(sequence.request_id)
            self._place(sequence, self._leave(sequence) - 1, now)

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


class _TenantLine:
    """The sequences of one tenant, by the tier that they have risen to."""

    def __init__(self) -> None:
        self._tiers = [_TierLine() for _ in _TIERS]
        self._ranks: dict[str, int] = {}
        self._came_as = [0] * len(_TIERS)  # how many, by their own tier
        self._weight = 1.0  # as the latest request said

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def head_start(self) -> int:
        """Quanta that the most urgent one gives; what has only risen to a tier does not have that tier's."""
        return next(start for start, count in zip(_HEAD_STARTS, self._came_as, strict=True) if count)

    def add(self, sequence: Sequence, rank: int, deadline: float) -> None:
        """Add a sequence to a tier."""
        self._tiers[rank].add(sequence, deadline)
        self._ranks[sequence.request_id] = rank
        self._came_as[_RANKS[sequence.request.tier]] += 1
        self._weight = sequence.request.weight

    def remove(self, sequence: Sequence) -> int:
        """Take out a sequence; returns the rank that it had."""
        rank = self._ranks.pop(sequence.request_id)
        self._tiers[rank].remove(sequence)
        self._came_as[_RANKS[sequence.request.tier]] -= 1
        return rank

    def deadline(self, now: float) -> float:
        """The earliest of the most urgent tier that can still be met."""
        return self._first_tier().deadline(now)

    def choose(self, now: float) -> Sequence:
        """Whose turn it is; it is going to be removed."""
        return self._first_tier().choose(now)

    def ahead_of(self, rank: int, now: float) -> Backlog:
        """What goes before a newcomer of a tier that can be in time."""
        parts = [tier.all() for tier in self._tiers[:rank]]
        parts.append(self._tiers[rank].ahead_of_newcomer(now))
        return Backlog(sum(part.requests for part in parts), sum(part.tokens for part in parts))

    def served_until(self, room: float) -> Backlog:
        """What is served until the tenant has used `room` more, by weight, not counting head starts."""
        requests, tokens = 0, 0
        for tier, start in zip(self._tiers, _HEAD_STARTS, strict=True):
            whole = tier.all()
            if whole.tokens:
                left = (room + start * QUANTUM) * self._weight - tokens
                share = max(0.0, min(1.0, left / whole.tokens))
                requests += round(share * whole.requests)
                tokens += round(share * whole.tokens)
        return Backlog(requests, tokens)

    def _first_tier(self) -> _TierLine:
        return next(tier for tier in self._tiers if len(tier))


class _TierLine:
    """The sequences of one tenant in one tier: those that can still be in time, and those that are late."""

    def __init__(self) -> None:
        self._in_time: LazyHeap[float, Sequence] = LazyHeap()
        self._late: LazyHeap[float, Sequence] = LazyHeap()
        self._tokens = 0
        self._late_tokens = 0
        self._since_late = 0  # taken in time since a late one was

    def __len__(self) -> int:
        return len(self._in_time) + len(self._late)

    def add(self, sequence: Sequence, deadline: float) -> None:
        """Add a sequence."""
        self._in_time.push(sequence.request_id, deadline, sequence, sequence.number)
        self._tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence."""
        if self._in_time.remove(sequence.request_id) is None:
            self._late.remove(sequence.request_id)
            self._late_tokens -= sequence.num_tokens
        self._tokens -= sequence.num_tokens

    def deadline(self, now: float) -> float:
        """The earliest that can still be met; infinite where there is none. It only grows, but for `add`."""
        for _ in range(_MOVES_A_CALL):
            first = self._in_time.first()
            if first is None or first[0] >= now:
                break
            deadline, sequence = first
            self._in_time.remove(sequence.request_id)
            self._late.push(sequence.request_id, deadline, sequence, sequence.number)
            self._late_tokens += sequence.num_tokens
        first = self._in_time.first()
        return inf if first is None else first[0]

    def choose(self, now: float) -> Sequence:
        """Whose turn it is; it is going to be removed."""
        self.deadline(now)
        in_time, late = self._in_time.first(), self._late.first()
        if late is not None and (in_time is None or self._since_late >= _IN_TIME_BY_LATE):
            self._since_late = 0
            return late[1]
        assert in_time is not None, "a tier without sequences has a turn"
        self._since_late += 1
        return in_time[1]

    def all(self) -> Backlog:
        """Everything that stands here."""
        return Backlog(len(self), self._tokens)

    def ahead_of_newcomer(self, now: float) -> Backlog:
        """What goes before one that comes now and can be in time: with those in time, each fourth is a late one."""
        self.deadline(now)
        in_time = len(self._in_time)
        late = min(len(self._late), in_time // _IN_TIME_BY_LATE)
        late_tokens = round(self._late_tokens * late / len(self._late)) if late else 0
        return Backlog(in_time + late, self._tokens - self._late_tokens + late_tokens)
