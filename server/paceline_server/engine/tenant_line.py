"""What waits on one tenant's account: tiers, deadlines, and what is overdue. The `slo` line has one for each tenant.

Under overload plain earliest-deadline-first serves nobody but the late, and so makes everybody late. So those that can
still be in time go first, the most urgent tier before all others and the earliest deadline first; each fourth turn goes
to the late.

Nobody starves: a sequence of a lower tier is overdue when it has been late for `promote_after` seconds for each tier
above its own, and every second turn of the late goes to the one that is so for longest, whatever its tier. When that
is, is known when it comes: nothing moves while time goes by, but from the sequences in time to the late ones, once.
"""

from __future__ import annotations

from math import inf

from paceline_server.engine.fairness import QUANTUM
from paceline_server.engine.heap import LazyHeap
from paceline_server.engine.interface import Tier
from paceline_server.engine.queue import Backlog
from paceline_server.engine.sequence import Sequence

TIERS = tuple(Tier)
RANKS = {tier: rank for rank, tier in enumerate(TIERS)}

HEAD_STARTS = (32, 16, 0)
"""Quanta by rank that a tenant may have used more and still go first."""

_EQUALS = 4  # sequences at most that are looked at for the one that goes first
_EQUAL_SHARE = 0.25  # of the time to its first token: who is due within that after a sequence is its equal
_MOVES_A_CALL = 64  # that become late; a hundred thousand of one deadline must not stop a step
_IN_TIME_BY_LATE = 3  # sequences that are served in time for each one that is late already


class TenantLine:
    """The sequences of one tenant.

    Args:
        promote_after: seconds that a sequence may be late for each tier above its own before it is overdue.
    """

    def __init__(self, promote_after: float) -> None:
        self._promote_after = promote_after
        self._tiers = [_TierLine() for _ in TIERS]
        self._overdue: LazyHeap[float, Sequence] = LazyHeap()  # all of the lower tiers, by when they are overdue
        self._overdue_had_last = False  # of the turns of the late
        self._weight = 1.0  # as the latest request said

    def __len__(self) -> int:
        return sum(len(tier) for tier in self._tiers)

    @property
    def head_start(self) -> int:
        """Quanta that the most urgent one gives."""
        return next(start for start, tier in zip(HEAD_STARTS, self._tiers, strict=True) if len(tier))

    def add(self, sequence: Sequence, deadline: float, now: float) -> None:
        """Add a sequence that wants its first token by `deadline`."""
        rank = RANKS[sequence.request.tier]
        self._tiers[rank].add(sequence, deadline, now)
        if rank > 0:
            overdue = deadline + rank * self._promote_after
            self._overdue.push(sequence.request_id, overdue, sequence, sequence.number)
        self._weight = sequence.request.weight

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence."""
        self._tiers[RANKS[sequence.request.tier]].remove(sequence)
        self._overdue.remove(sequence.request_id)

    def deadline(self, now: float) -> float:
        """The earliest of the most urgent tier that can still be met; infinite where there is none."""
        return self._first_tier().deadline(now)

    def first_in_time(self, now: float) -> Sequence | None:
        """The one of the most urgent tier with the earliest deadline that can still be met, or None."""
        return self._first_tier().first_in_time(now)

    def choose(self, now: float) -> list[Sequence]:
        """Whose turn it is, and its equals behind it; one of them is going to be removed."""
        tier = self._first_tier()
        late, overdue = tier.first_late(now), self._first_overdue(now)
        in_time = tier.first_in_time(now)  # last: to look at the late may move what stood here
        if in_time is not None and (tier.since_late < _IN_TIME_BY_LATE or (late is None and overdue is None)):
            tier.since_late += 1
            return tier.in_time()
        tier.since_late = 0
        self._overdue_had_last = overdue is not None and (late is None or not self._overdue_had_last)
        return [overdue] if overdue is not None and self._overdue_had_last else tier.late()

    def ahead_of(self, rank: int, now: float) -> Backlog:
        """What goes before a newcomer of a tier that can be in time."""
        above = (tier.all() for tier in self._tiers[:rank])
        return sum(above, self._tiers[rank].ahead_of_newcomer(now))

    def served_until(self, room: float) -> Backlog:
        """What is served until the tenant has used `room` more, by weight, not counting head starts."""
        served = Backlog()
        for tier, start in zip(self._tiers, HEAD_STARTS, strict=True):
            whole = tier.all()
            if whole.tokens:
                left = (room + start * QUANTUM) * self._weight - served.tokens
                share = max(0.0, min(1.0, left / whole.tokens))
                served += Backlog(round(share * whole.requests), round(share * whole.tokens))
        return served

    def _first_overdue(self, now: float) -> Sequence | None:
        first = self._overdue.first()
        return None if first is None or first[0] >= now else first[1]

    def _first_tier(self) -> _TierLine:
        return next(tier for tier in self._tiers if len(tier))


class _TierLine:
    """The sequences of one tenant in one tier, by deadline: those that can still be in time, and the late ones."""

    def __init__(self) -> None:
        self._in_time: LazyHeap[float, Sequence] = LazyHeap()
        self._late: LazyHeap[float, Sequence] = LazyHeap()
        self._tokens = 0
        self._late_tokens = 0
        self.since_late = 0  # taken in time since a late one was

    def __len__(self) -> int:
        return len(self._in_time) + len(self._late)

    def add(self, sequence: Sequence, deadline: float, now: float) -> None:
        """Add a sequence."""
        self._tokens += sequence.num_tokens
        if deadline < now:
            self._add_late(sequence, deadline)
        else:
            self._in_time.push(sequence.request_id, deadline, sequence, sequence.number)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence."""
        self._tokens -= sequence.num_tokens
        if self._in_time.remove(sequence.request_id) is None:
            self._late.remove(sequence.request_id)
            self._late_tokens -= sequence.num_tokens

    def deadline(self, now: float) -> float:
        """The earliest that can still be met; infinite where there is none. It only grows, but for `add`."""
        for _ in range(_MOVES_A_CALL):
            first = self._in_time.first()
            if first is None or first[0] >= now:
                break
            deadline, sequence = first
            self._in_time.remove(sequence.request_id)
            self._add_late(sequence, deadline)
        first = self._in_time.first()
        return inf if first is None else first[0]

    def first_in_time(self, now: float) -> Sequence | None:
        """The one with the earliest deadline that can still be met, or None."""
        self.deadline(now)
        first = self._in_time.first()
        return None if first is None else first[1]

    def first_late(self, now: float) -> Sequence | None:
        """The one that is late by most, or None."""
        self.deadline(now)
        first = self._late.first()
        return None if first is None else first[1]

    def in_time(self) -> list[Sequence]:
        """The first of those that can still be in time, and its equals in order."""
        return _equals(self._in_time)

    def late(self) -> list[Sequence]:
        """The one that is late by most, and its equals in order."""
        return _equals(self._late)

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

    def _add_late(self, sequence: Sequence, deadline: float) -> None:
        self._late.push(sequence.request_id, deadline, sequence, sequence.number)
        self._late_tokens += sequence.num_tokens


def _equals(line: LazyHeap[float, Sequence]) -> list[Sequence]:
    """The first sequence, and some of those behind it that are about as soon due, in order."""
    (deadline, first), *others = line.leading(_EQUALS)
    latest = deadline + _EQUAL_SHARE * (deadline - first.arrival)
    return [first, *(one for due, one in others if due <= latest)]
