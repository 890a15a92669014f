"""The waiting line: who enters the batch next.

The scheduler asks for the head and takes it; a policy is an implementation of this interface.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from paceline_server.engine.sequence import Sequence


class FcfsQueue:
    """First come, first served; a preempted sequence returns to the head. Every operation is O(1)."""

    def __init__(self) -> None:
        self._line: OrderedDict[str, Sequence] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting sequences that have to be computed, cached prefixes not discounted."""
        return self._tokens

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at the end."""
        self._line[sequence.request_id] = sequence
        self._tokens += sequence.num_tokens

    def push_first(self, sequence: Sequence) -> None:
        """Add a preempted sequence at the head."""
        self.push(sequence)
        self._line.move_to_end(sequence.request_id, last=False)

    def head(self) -> Sequence | None:
        """The sequence that enters next, or None."""
        return next(iter(self._line.values()), None)

    def remove(self, request_id: str) -> Sequence | None:
        """Take a sequence out, wherever it stands; None where there is no such one."""
        sequence = self._line.pop(request_id, None)
        if sequence is not None:
            self._tokens -= sequence.num_tokens
        return sequence
