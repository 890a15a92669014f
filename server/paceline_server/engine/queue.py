"""The waiting line: who enters the batch next, and the policies that are a single order.

The scheduler takes the first sequence, places it or puts it back; a policy is an implementation of `WaitingLine`.
`fcfs`, `priority` and `sjf` are one class with three keys (`OrderedLine`); `slo` has a module of its own.

Ageing without sorting anew: waiting is worth the same to everybody, so "key minus age" orders two sequences as "key
plus arrival" does. The latter never changes, and nothing has to move while time goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Protocol

from paceline_server.engine.heap import LazyHeap
from paceline_server.engine.interface import Tier
from paceline_server.engine.sequence import Sequence

SECONDS_PER_PRIORITY = 10.0
"""Waiting that weighs as much as one level of `priority`."""

SECONDS_PER_TOKEN = 0.01
"""Waiting that weighs as much as one token of a job, under `sjf`."""


MAX_LOSSES = 2
"""Preemptions after which a sequence keeps its blocks before all that rank above it: so that a flood of those ends."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Work that goes before somebody.

    Attributes:
        requests: how many sequences.
        tokens: tokens to compute before each has its next output token, cached prefixes not discounted.
        overtaken_by: tiers whose newcomers go before as well.
    """

    requests: int = 0
    tokens: int = 0
    overtaken_by: tuple[Tier, ...] = ()

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> Backlog:
        """These sequences, and no newcomers."""
        tokens = [sequence.num_tokens for sequence in sequences]
        return cls(len(tokens), sum(tokens))

    def __add__(self, other: Backlog) -> Backlog:
        """Both; their newcomers are not added up."""
        assert not other.overtaken_by
        return Backlog(self.requests + other.requests, self.tokens + other.tokens, self.overtaken_by)


class WaitingLine(Protocol):
    """Sequences that wait, in the order of a policy. Times are on the engine's clock, in seconds."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting sequences that have to be computed, cached prefixes not discounted."""
        ...

    @property
    def oldest_arrival(self) -> float | None:
        """When the sequence arrived that has waited longest; None where nobody waits."""
        ...

    def push(self, sequence: Sequence, now: float) -> None:
        """Add a new sequence."""
        ...

    def put_back(self, sequence: Sequence, now: float) -> None:
        """Return a sequence that was taken: one that did not fit, to its place; a preempted one, before all equals."""
        ...

    def take(self, now: float, *, scarce: bool = False, owed: Sequence | None = None) -> Sequence | None:
        """Take out the sequence that should enter next, or None.

        Args:
            scarce: few slots are left; a policy may keep them for somebody who is not there yet.
            owed: was taken, did not fit and has been passed for long enough: if it still waits it is the next one,
                behind those alone that were preempted.
        """
        ...

    def take_pressing(self, now: float) -> Sequence | None:
        """Take out the sequence for which a running one should make room now, or None."""
        ...

    def remove(self, request_id: str) -> Sequence | None:
        """Take a sequence out, wherever it stands; None where there is no such one."""
        ...

    def charge(self, sequence: Sequence, cost: float) -> None:
        """Book what a sequence has used of the engine, in weighted tokens."""
        ...

    def favours(self, sequence: Sequence, now: float) -> bool:
        """Whether the prompt of a sequence that was taken goes before anything that waits."""
        ...

    def rank(self, sequence: Sequence) -> float:
        """Of sequences that were taken those of the largest rank lose their blocks first when the pool is exhausted.

        It changes with preemptions alone; where ranks differ it is the smallest of all after `MAX_LOSSES` of them.
        """
        ...

    def note_end(self, sequence: Sequence) -> None:
        """A sequence that was taken is gone for good."""
        ...

    def ahead_of(self, sequence: Sequence, now: float) -> Backlog:
        """What would go before a sequence if it were pushed now."""
        ...


class Arrivals:
    """All that wait, whatever their order: what every line knows of them."""

    def __init__(self) -> None:
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

    def _note_entry(self, sequence: Sequence) -> None:
        self._by_arrival.push(sequence.request_id, sequence.arrival, sequence, sequence.number)
        self._tokens += sequence.num_tokens

    def _still_waits(self, sequence: Sequence) -> bool:
        return sequence.request_id in self._by_arrival

    def _note_exit(self, request_id: str) -> Sequence | None:
        """The sequence, which has yet to leave the line's own order; None where it does not wait."""
        sequence = self._by_arrival.remove(request_id)
        if sequence is not None:
            self._tokens -= sequence.num_tokens
        return sequence


class OrderedLine(Arrivals):
    """One order for all: smallest key first, then in order of arrival; preempted sequences first of all.

    Args:
        key: of a sequence, in seconds; it must not change while the sequence waits. A key that grows with the arrival
            without bound starves nobody.
        ranks: whether sequences rank by their `priority` once they run, and not all alike.
    """

    def __init__(self, key: Callable[[Sequence], float], *, ranks: bool = False) -> None:
        super().__init__()
        self._key = key
        self._ranks = ranks
        self._line: LazyHeap[float, Sequence] = LazyHeap()
        self._resumed: LazyHeap[float, Sequence] = LazyHeap()

    def push(self, sequence: Sequence, now: float) -> None:
        """Add a new sequence."""
        self.put_back(sequence, now)

    def put_back(self, sequence: Sequence, now: float) -> None:
        """Return a sequence that was taken."""
        line, key = (self._resumed, 0.0) if sequence.preemptions else (self._line, self._key(sequence))
        line.push(sequence.request_id, key, sequence, sequence.number)
        self._note_entry(sequence)

    def take(self, now: float, *, scarce: bool = False, owed: Sequence | None = None) -> Sequence | None:
        """Take out the first sequence, or None."""
        first = self._resumed.first()
        if first is None and owed is not None and self._still_waits(owed):
            return self.remove(owed.request_id)
        first = first or self._line.first()
        return None if first is None else self.remove(first[1].request_id)

    def take_pressing(self, now: float) -> Sequence | None:
        """None: there are no deadlines here."""
        return None

    def remove(self, request_id: str) -> Sequence | None:
        """Take a sequence out, wherever it stands."""
        sequence = self._note_exit(request_id)
        if sequence is not None:
            (self._resumed if sequence.preemptions else self._line).remove(request_id)
        return sequence

    def charge(self, sequence: Sequence, cost: float) -> None:
        """Nothing here depends on what was used."""

    def favours(self, sequence: Sequence, now: float) -> bool:
        """None: a long prompt must leave something to the short ones behind it."""
        return False

    def rank(self, sequence: Sequence) -> float:
        """Its `priority` where that ranks; waiting longer for a slot is no reason to keep blocks longer."""
        return spared(sequence, sequence.request.priority) if self._ranks else 0.0

    def note_end(self, sequence: Sequence) -> None:
        """Nothing here depends on who runs."""

    def ahead_of(self, sequence: Sequence, now: float) -> Backlog:
        """All that wait with a smaller or equal key: O(waiting), but O(1) where the order is that of arrival."""
        if self._key is by_arrival:
            return Backlog(len(self), self._tokens)
        key = self._key(sequence)
        return Backlog.of(self._resumed) + Backlog.of(one for one in self._line if self._key(one) <= key)


def spared(sequence: Sequence, rank: float) -> float:
    """The rank of a running sequence, or the smallest of all where it has lost its blocks often enough."""
    return -inf if sequence.preemptions >= MAX_LOSSES else rank


def by_arrival(sequence: Sequence) -> float:
    """First come, first served."""
    return sequence.arrival


def by_priority(sequence: Sequence) -> float:
    """Smaller `priority` first; a level is caught up by `SECONDS_PER_PRIORITY` of waiting."""
    return sequence.arrival + SECONDS_PER_PRIORITY * sequence.request.priority


def by_size(sequence: Sequence) -> float:
    """Shortest job first, by prompt and `max_tokens`; each token is caught up by `SECONDS_PER_TOKEN` of waiting."""
    size = len(sequence.request.prompt_token_ids) + sequence.max_tokens
    return sequence.arrival + SECONDS_PER_TOKEN * size
