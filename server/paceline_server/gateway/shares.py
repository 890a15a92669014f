"""The shares of a full queue: which requests give way to another tenant's. Pure; `backpressure` acts on what it says.

Where a tenant's request finds the queue full, the tenant that holds the most by its weight loses its newest request to
it, unless that is its own or one that has no more than the newcomer's would then have. So none is kept from its share
by what others send, while a tenant that is alone may have all of it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Ticket:
    """One request between its arrival and its first token.

    Attributes:
        tenant: whose it is; `weight`: the share it has.
        lose: ends it, where its place goes to another tenant's.
        placed: it has a place. One that came to a full queue has none before another's gives way to it.
        prompt_tokens: 0 until it is submitted.
        step: the engine's step count at submission; None before.
    """

    tenant: str
    weight: float
    lose: Callable[[], None]
    placed: bool
    prompt_tokens: int = 0
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What a tenant's newcomer asks of the queue: places, or prompt tokens."""

    tenant: str
    weight: float
    amount: int


def giving_way(line: Iterable[Ticket], size: Callable[[Ticket], int], claim: Claim, excess: int) -> list[Ticket] | None:
    """The requests that give up `excess` for a claim: each the newest of the tenant that holds the most by its weight.

    Args:
        line: those that have something, oldest first, without the newcomer.
        size: what one of them has.

    Returns:
        None where a tenant would have to give that has no more by its weight than the claimant would then have.
    """
    held: Counter[str] = Counter()
    lines: dict[str, list[Ticket]] = {}
    for one in line:
        if size(one):
            held[one.tenant] += size(one)
            lines.setdefault(one.tenant, []).append(one)
    claimed = (held[claim.tenant] + claim.amount) / claim.weight
    richest = [(-held[tenant] / own[-1].weight, age, own) for age, (tenant, own) in enumerate(lines.items())]
    heapq.heapify(richest)
    leaving: list[Ticket] = []
    while excess > 0:
        if not richest or -richest[0][0] <= claimed:
            return None
        _, age, own = heapq.heappop(richest)
        newest = own.pop()
        leaving.append(newest)
        held[newest.tenant] -= size(newest)
        excess -= size(newest)
        if own:
            heapq.heappush(richest, (-held[newest.tenant] / own[-1].weight, age, own))
    return leaving
