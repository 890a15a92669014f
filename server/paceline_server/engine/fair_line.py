"""A line in which tenants take turns by weight; inside a tenant first come, first served. `embedder` keeps texts here.

The same virtual token counters as under the policy `slo` (`fairness`), without tiers and deadlines: a batch of texts is
over soon, and a text that has been computed costs nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from paceline_server.engine.dynamic import FifoLine
from paceline_server.engine.fairness import TokenCounters

Item = TypeVar("Item")


class FairLine(Generic[Item]):
    """Implements `dynamic.Line`; each operation costs O(tenants that wait) at most.

    Args:
        name: of an item, unique among those that wait.
        size: tokens of an item.
        arrival: when it came.
        share: an item's tenant, and that tenant's weight, > 0.
    """

    def __init__(
        self,
        name: Callable[[Item], str],
        size: Callable[[Item], int],
        arrival: Callable[[Item], float],
        share: Callable[[Item], tuple[str, float]],
    ) -> None:
        self._name, self._size, self._arrival, self._share = name, size, arrival, share
        self._counters = TokenCounters()
        self._lines: dict[str, FifoLine[Item]] = {}
        self._tenants: dict[str, str] = {}  # of those that wait, by their names
        self._floor = 0.0  # counter of the tenant that was served last: newcomers start there when nobody waits

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def num_tokens(self) -> int:
        """Tokens of all that wait."""
        return sum(line.num_tokens for line in self._lines.values())

    @property
    def oldest_arrival(self) -> float | None:
        """When the one came that has waited longest; None where nobody waits."""
        arrivals = (line.oldest_arrival for line in self._lines.values())
        return min((arrival for arrival in arrivals if arrival is not None), default=None)

    def push(self, item: Item) -> None:
        """Add a newcomer; a tenant of which nothing waited is lifted to those that wait."""
        tenant, _ = self._share(item)
        if tenant not in self._lines:
            smallest = min(map(self._counters.used, self._lines), default=self._floor)
            self._counters.enter(tenant, smallest, self._lines.__contains__)
        self._line(tenant).push(item)
        self._tenants[self._name(item)] = tenant

    def take(self, now: float) -> Item | None:
        """Take out the first of the tenant that has used least, and book it; None where nobody waits."""
        if not self._lines:
            return None
        tenant = min(self._lines, key=self._counters.used)
        self._floor = max(self._floor, self._counters.used(tenant))
        item = self._lines[tenant].take(now)
        assert item is not None, "an empty line is kept"
        self._charge(item, 1.0)
        self._left(self._name(item))
        return item

    def put_back(self, item: Item, now: float) -> None:
        """Return one that was taken, to the head of its tenant's line; nothing is booked for it."""
        tenant, _ = self._share(item)
        self._charge(item, -1.0)
        self._line(tenant).put_back(item, now)
        self._tenants[self._name(item)] = tenant

    def remove(self, name: str) -> Item | None:
        """Take one out, wherever it stands; None where there is no such one."""
        tenant = self._tenants.get(name)
        if tenant is None:
            return None
        item = self._lines[tenant].remove(name)
        self._left(name)
        return item

    def _charge(self, item: Item, sign: float) -> None:
        tenant, weight = self._share(item)
        self._counters.charge(tenant, sign * self._size(item), weight)

    def _line(self, tenant: str) -> FifoLine[Item]:
        if tenant not in self._lines:
            self._lines[tenant] = FifoLine(self._name, self._size, self._arrival)
        return self._lines[tenant]

    def _left(self, name: str) -> None:
        tenant = self._tenants.pop(name)
        if not len(self._lines[tenant]):
            del self._lines[tenant]
