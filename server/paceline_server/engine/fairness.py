"""What tenants have used, as virtual token counters. The `slo` line asks it whose turn it is.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): every tenant has a counter of the work done
for it, input and output tokens weighted and divided by the tenant's share; the tenant with the smallest counter goes
first. A tenant that comes back from idle is lifted to the smallest counter of those that wait, less a small credit, so
that nobody saves up while idle and then keeps the others out. Between two tenants that both have work waiting, the work
done for them differs by no more than a constant, however long they go on.

Two things are added. What a sequence occupies is charged too, by block and step: a long context costs its tenant the
memory that it keeps from others (the paper's profiled cost has such a product of input and output as well). And
counters are compared in steps of a quantum: among tenants of one step the earliest deadline decides, at the price of
one more quantum in the bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

INPUT_COST = 1.0
"""Of a prompt token that has to be computed; a cached one is free."""

OUTPUT_COST = 2.0
"""Of a generated token: the paper's weight, and about the ratio of public prices per token."""

BLOCK_STEP_COST = 0.05
"""Of one KV block held during one step: 40 blocks (640 tokens of context) cost as much as the token itself."""

QUANTUM = 256.0
"""Weighted tokens within which two tenants count as even."""

CREDIT = 4096.0
"""Weighted tokens that a tenant which comes back may be behind those that wait: some requests' worth of a burst."""

_REMEMBERED = 4096
_ACTIVE_SECONDS = 10.0


class TokenCounters:
    """Weighted tokens by tenant, divided by the tenant's weight."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._bound = _REMEMBERED

    def used(self, tenant: str) -> float:
        """The tenant's counter."""
        return self._used.get(tenant, 0.0)

    def level(self, tenant: str) -> int:
        """The counter in whole quanta: what tenants are compared by."""
        return int(self.used(tenant) / QUANTUM)

    def charge(self, tenant: str, cost: float, weight: float) -> None:
        """Book work done for a tenant.

        Args:
            cost: weighted tokens.
            weight: the tenant's share relative to others, > 0.
        """
        self._used[tenant] = self.used(tenant) + cost / weight

    def enter(self, tenant: str, floor: float, waits: Callable[[str], bool]) -> None:
        """Something of a tenant comes of which nothing waited: it is lifted to those that wait, less the credit.

        Args:
            floor: the smallest counter of those that wait.
            waits: whether something of a tenant waits.
        """
        if self.used(tenant) < floor - CREDIT:
            self._used[tenant] = floor - CREDIT
        self.forget_idle(lambda name: name == tenant or waits(name))

    def forget_idle(self, waits: Callable[[str], bool]) -> None:
        """Bound the memory: of very many tenants, those that wait for nothing start anew when they come back.

        Args:
            waits: whether something of a tenant waits.
        """
        if len(self._used) > self._bound:
            self._used = {tenant: used for tenant, used in self._used.items() if waits(tenant)}
            self._bound = max(_REMEMBERED, 2 * len(self._used))


class Slots:
    """Which tenants hold slots, and who is active: sent something lately, waits for something, or holds slots.

    The last slots are kept from the tenant that holds most, by weight, unless that is no more than its share: one that
    sends little finds a slot free though another one floods. What a tenant leaves of its share goes to the others, so
    one of them may hold more than a share while another holds more still. Only while there are several tenants: one
    that is alone has all of them.
    """

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._total = 0
        self._active: OrderedDict[str, tuple[float, float]] = OrderedDict()  # weight, and when it was last seen to be
        self._weights = 0.0  # of those in `_active`

    def note(self, tenant: str, weight: float, now: float) -> None:
        """A tenant is active."""
        self._forget(tenant)
        self._active[tenant] = (weight, now)
        self._weights += weight

    def take(self, tenant: str, weight: float, now: float) -> None:
        """A sequence of the tenant gets a slot."""
        self.note(tenant, weight, now)
        self._held[tenant] = self._held.get(tenant, 0) + 1
        self._total += 1

    def give_back(self, tenant: str) -> None:
        """A sequence of the tenant gives its slot back."""
        self._total -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]

    def may_take_last(self, tenant: str, now: float, waits: Callable[[str], bool]) -> bool:
        """Whether a tenant that waits may have one of the last slots.

        Args:
            waits: whether something of a tenant waits.
        """
        self._forget_idle(now, waits)
        weight, held = self._active[tenant][0], self._held.get(tenant, 0)
        if len(self._active) == 1 or held < (self._total + 1) * weight / self._weights:
            return True
        return any(held / weight < count / self._active[name][0] for name, count in self._held.items())

    def _forget_idle(self, now: float, waits: Callable[[str], bool]) -> None:
        while self._active:
            tenant, (weight, seen) = next(iter(self._active.items()))
            if now - seen < _ACTIVE_SECONDS:
                return
            if tenant in self._held or waits(tenant):
                self.note(tenant, weight, now)
            else:
                self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        known = self._active.pop(tenant, None)
        if known is not None:
            self._weights -= known[0]
