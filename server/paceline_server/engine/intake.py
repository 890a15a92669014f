"""What both schedulers do alike: sequences come in with a number, and go when their time is over.

`scheduler` and `request_level` are built on it; what becomes of a sequence in between is theirs. Pure, as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from paceline_server.engine.heap import LazyHeap
from paceline_server.engine.interface import FinishReason, TokenOutput
from paceline_server.engine.queue import WaitingLine
from paceline_server.engine.sequence import Sequence


@dataclass(slots=True)
class SchedulerTotals:
    """Counts since the start.

    Attributes:
        padded_tokens, held_tokens: computed for nothing: behind shorter prompts, and for members of a batch that had
            ended. Scheduling by steps knows neither.
    """

    preemptions: int = 0
    expirations: int = 0
    padded_tokens: int = 0
    held_tokens: int = 0


class Intake(ABC):
    """The waiting line of a scheduler, and the timeouts of all sequences that are not gone.

    Args:
        waiting: an empty line; its class is the policy.
    """

    def __init__(self, waiting: WaitingLine) -> None:
        self.waiting = waiting
        self.totals = SchedulerTotals()
        self._expiring: LazyHeap[float, Sequence] = LazyHeap()  # sequences with a timeout, by when it is over
        self._arrivals = 0

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the waiting line. The caller has checked that it can run alone."""
        self._arrivals += 1
        sequence.number = self._arrivals
        self.waiting.push(sequence, sequence.arrival)
        if sequence.expiry is not None:
            self._expiring.push(sequence.request_id, sequence.expiry, sequence)

    @abstractmethod
    def abort(self, request_id: str) -> Sequence | None:
        """Drop a sequence, waiting or running, and take its blocks back; None where there is no such one."""

    def expire(self, now: float) -> list[TokenOutput]:
        """Drop all sequences whose timeout is over, waiting and running; returns the last output of each."""
        outputs: list[TokenOutput] = []
        for late in self._expiring.pop_until(now):
            sequence = self.abort(late.request_id)
            assert sequence is not None, "a sequence that is gone has a timeout"
            self.totals.expirations += 1
            outputs.append(sequence.output((), FinishReason.TIMEOUT))
        return outputs
