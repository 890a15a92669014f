"""The request-level batcher of a classic gateway: takes requests off a line as long as they fit one batch.

Kept for two reasons: embeddings have no steps to join or leave, so their batches are made here (`embedder`); and
generation by whole requests (`request_level`) is the baseline that continuous batching is measured against.

Pure: no clock, no torch. How many requests and tokens a batch holds is the caller's test; how long a batch waits for
company is `window`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")


class Line(Protocol[Item]):
    """Those that wait, in some order. `queue.WaitingLine` is one."""

    def take(self, now: float) -> Item | None:
        """Take out the first, or None."""
        ...

    def put_back(self, item: Item, now: float) -> None:
        """Return one that was taken to its place, before those behind it."""
        ...


def pop_batch(line: Line[Item], fits: Callable[[Sequence[Item]], bool], now: float) -> list[Item]:
    """The longest run from the head of the line that fits one batch; what overflows goes back to the head.

    Nobody is passed, so the order is kept and nobody is starved by smaller ones.

    Args:
        fits: whether these may share a batch. Each must fit alone: whoever lets one into the line has refused it else.
    """
    batch: list[Item] = []
    while (item := line.take(now)) is not None:
        batch.append(item)
        if not fits(batch):
            line.put_back(batch.pop(), now)
            assert batch, "an item that fits no batch would block the line for ever"
            break
    return batch


class FifoLine(Generic[Item]):
    """First come, first served, and anybody can be taken out by name in O(1).

    Args:
        name: of an item, unique among those that wait.
        size: tokens of an item.
        arrival: when it came.
    """

    def __init__(
        self, name: Callable[[Item], str], size: Callable[[Item], int], arrival: Callable[[Item], float]
    ) -> None:
        self._name = name
        self._size = size
        self._arrival = arrival
        self._items: OrderedDict[str, Item] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_tokens(self) -> int:
        """Tokens of all that wait."""
        return self._tokens

    @property
    def oldest_arrival(self) -> float | None:
        """When the first of the line came; None where nobody waits."""
        return self._arrival(next(iter(self._items.values()))) if self._items else None

    def push(self, item: Item) -> None:
        """Add a newcomer."""
        name = self._name(item)
        assert name not in self._items, f"{name} waits already"
        self._items[name] = item
        self._tokens += self._size(item)

    def take(self, now: float) -> Item | None:
        """Take out the first, or None."""
        return self.remove(next(iter(self._items))) if self._items else None

    def put_back(self, item: Item, now: float) -> None:
        """Return one that was taken, to the head."""
        self.push(item)
        self._items.move_to_end(self._name(item), last=False)

    def remove(self, name: str) -> Item | None:
        """Take one out, wherever it stands; None where there is no such one."""
        item = self._items.pop(name, None)
        if item is not None:
            self._tokens -= self._size(item)
        return item
