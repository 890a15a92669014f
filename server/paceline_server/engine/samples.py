"""Requests for several answers to one prompt (`n` > 1): each answer is a sequence of its own, and the prompt is one.

`core` splits a request here. The first sample enters the waiting line alone; when its prompt is computed the others
follow, and `tables` forks their blocks from it instead of computing the prompt again. If the first one goes before
that, the others enter at once. Sample i is drawn with the request's seed + i, so that it is what a single request with
that seed would get.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from paceline_server.engine.interface import GenerationRequest, TokenOutput
from paceline_server.engine.sequence import Sequence

_SEED_BITS = 63


@dataclass(slots=True)
class _Group:
    """Samples of one request that have not ended.

    Attributes:
        open: ids of their sequences, by index.
        held: those that have not entered the line.
    """

    open: dict[int, str]
    held: list[Sequence]


def split(request: GenerationRequest) -> list[GenerationRequest]:
    """The samples of a request as requests for one answer each; a request for one answer is its own sample."""
    if request.n == 1:
        return [request]
    return [
        replace(
            request,
            request_id=f"{request.request_id}#{index}",
            n=1,
            sampling=replace(request.sampling, seed=(request.sampling.seed + index) % (1 << _SEED_BITS)),
        )
        for index in range(request.n)
    ]


def num_waiting(waiting: Iterable[Sequence], running: Iterable[Sequence]) -> int:
    """How many requests wait: those of which nothing runs, each counted once, however many of its answers wait."""
    names = {sequence.group or sequence.request_id for sequence in waiting}
    return len(names.difference(sequence.group for sequence in running))


class SampleGroups:
    """The requests under way that ask for more than one answer."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._places: dict[str, tuple[str, int]] = {}  # request and index by the id of a sample's sequence

    def __len__(self) -> int:
        return len(self._groups)

    def open(self, request_id: str, samples: list[Sequence]) -> None:
        """Take up a request whose first sample has entered the line."""
        first, *others = samples
        for sample in others:
            sample.take_digests_of(first)
        ids = {index: sample.request_id for index, sample in enumerate(samples)}
        self._groups[request_id] = _Group(ids, others)
        self._places |= {sample: (request_id, index) for index, sample in ids.items()}

    def note(self, outputs: Iterable[TokenOutput]) -> tuple[list[TokenOutput], list[Sequence]]:
        """Take what a step brought.

        Returns:
            The outputs under the names of their requests, and samples that are to enter the line now.
        """
        named: list[TokenOutput] = []
        entering: list[Sequence] = []
        for output in outputs:
            place = self._places.get(output.request_id)
            if place is None:
                named.append(output)
                continue
            request_id, index = place
            named.append(replace(output, request_id=request_id, index=index))
            entering += self._take_held(request_id)
            if output.finish is not None:
                self._end(request_id, index)
        return named, entering

    def leave(self, request_id: str, index: int | None = None) -> tuple[list[str], list[Sequence]]:
        """Give up a request, or one sample of it; what is unknown, or has ended, is no error.

        Returns:
            Ids of the sequences to abort, and samples that are to enter the line now.
        """
        group = self._groups.get(request_id)
        if group is None:
            return [request_id], []
        leaving = [one for one in group.open if index in (None, one)]
        ids = [group.open[one] for one in leaving]
        first_leaves = any(sample not in {one.request_id for one in group.held} for sample in ids)
        group.held = [one for one in group.held if one.request_id not in ids]
        entering = self._take_held(request_id) if first_leaves else []
        for one in leaving:
            self._end(request_id, one)
        return ids, entering

    def _take_held(self, request_id: str) -> list[Sequence]:
        group = self._groups[request_id]
        held, group.held = group.held, []
        return held

    def _end(self, request_id: str, index: int) -> None:
        group = self._groups[request_id]
        del self._places[group.open.pop(index)]
        if not group.open:
            del self._groups[request_id]
