"""A priority queue whose entries can be taken out by name. The waiting lines are made of it.

A binary heap with lazy removal: an entry that was removed stays in the heap as a dead one until it comes to the top,
or until the dead outnumber the living and the heap is built anew. So memory stays within about twice of what lives, and
every operation is O(log n), amortised.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", float, tuple[int, float])
T = TypeVar("T")

_DEAD_AT_LEAST = 64  # below that many dead entries building anew is not worth it


class LazyHeap(Generic[K, T]):
    """Items by name, smallest key first.

    Entries of equal key go by their tie, then by their name: the order depends on nothing but the entries.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[K, int, str, T]] = []
        self._living: dict[str, tuple[K, int, str, T]] = {}

    def __len__(self) -> int:
        return len(self._living)

    def __iter__(self) -> Iterator[T]:
        return (entry[3] for entry in self._living.values())

    def __contains__(self, name: str) -> bool:
        return name in self._living

    def push(self, name: str, key: K, item: T, tie: int = 0) -> None:
        """Add an item; one of that name that is already there moves to the new key."""
        entry = (key, tie, name, item)
        self._living[name] = entry
        heappush(self._heap, entry)
        self._sweep()

    def first(self) -> tuple[K, T] | None:
        """Key and item of the first entry, which stays; None where there is none."""
        while self._heap:
            entry = self._heap[0]
            if self._living.get(entry[2]) is entry:
                return entry[0], entry[3]
            heappop(self._heap)
        return None

    def pop_until(self, key: K) -> Iterator[T]:
        """Take out the items whose key is at most `key`, in order; others may be removed meanwhile."""
        while (first := self.first()) is not None and first[0] <= key:
            _, _, name, item = self._heap[0]
            self.remove(name)
            yield item

    def leading(self, count: int) -> list[tuple[K, T]]:
        """Keys and items of the first entries in order, up to `count`; fewer if many dead ones stand among them.

        O(count log count): an entry's place in the heap is below that of a smaller one, so only what is below those
        seen can be next.
        """
        found: list[tuple[K, T]] = []
        below = [(self._heap[0], 0)] if self.first() is not None else []
        for _ in range(2 * count):
            if not below or len(found) == count:
                break
            entry, place = heappop(below)
            if self._living.get(entry[2]) is entry:
                found.append((entry[0], entry[3]))
            for child in range(2 * place + 1, min(2 * place + 3, len(self._heap))):
                heappush(below, (self._heap[child], child))
        return found

    def get(self, name: str) -> T | None:
        """The item of that name, or None."""
        entry = self._living.get(name)
        return None if entry is None else entry[3]

    def remove(self, name: str) -> T | None:
        """Take out the item of that name, wherever it stands; None where there is none."""
        entry = self._living.pop(name, None)
        if entry is None:
            return None
        if self._heap[0] is entry:
            heappop(self._heap)
        else:
            self._sweep()
        return entry[3]

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._living) + _DEAD_AT_LEAST:
            self._heap = list(self._living.values())
            heapify(self._heap)
