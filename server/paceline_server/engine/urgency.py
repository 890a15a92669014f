"""Which running sequences make room for a request whose deadline is near. The scheduler asks when one does not fit.

Only those of a lower tier do, and never the oldest, which has to finish. What is thrown away is bounded, and so is how
many do so for one request, and how often one does. Tenants keep their shares: room goes to another sequence of the same
tenant, or to a tenant that holds less by weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from paceline_server.engine.sequence import Sequence
from paceline_server.engine.tables import BlockTables
from paceline_server.engine.tenant_line import RANKS

MAX_YIELDS = 2
"""Times that a sequence makes room for a more urgent one."""

MAX_VICTIMS = 4
"""Sequences that make room for one request: each is an answer that pauses."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A sequence that may make room.

    Attributes:
        cost: computed tokens that preempting it is worth.
        gain: blocks for the urgent one, its own reserve included.
    """

    sequence: Sequence
    cost: int
    gain: int


def cheapest_victims(
    urgent: Sequence, running: Ordered[Sequence], tables: BlockTables, max_running: int, max_cost: int
) -> list[Sequence]:
    """Those in whose place the urgent one fits; empty where it fits as it is, or no such ones are found.

    Few rather than many: while none that is left frees enough, the one that frees most goes; then the cheapest of those
    that do. A block that victims share with each other is not counted on.

    Args:
        urgent: waits and holds no blocks.
        running: the oldest first.
        tables: of these; a block must stay free for each that goes on running.
        max_running: sequences that may run.
        max_cost: computed tokens that may be thrown away.
    """
    prefix = tables.cached_blocks(urgent)
    fresh = tables.blocks.blocks_for(urgent.num_tokens) - len(prefix)
    missing = fresh + len(running) - tables.blocks.num_free_without(prefix)
    if missing <= 0 and len(running) < max_running:  # to count the candidates' blocks is the dear part
        return []
    held = Counter(one.request.tenant for one in running)
    candidates = [
        _Candidate(one, tables.preemption_cost(one), _freed(one, prefix, tables) + 1)
        for one in running[1:]
        if one.yields < MAX_YIELDS and RANKS[one.request.tier] > RANKS[urgent.request.tier]
    ]
    victims: list[Sequence] = []
    while missing > 0 or len(running) - len(victims) >= max_running:
        victim = _next_victim([one for one in candidates if one.cost <= max_cost], urgent, held, missing)
        if victim is None or len(victims) == MAX_VICTIMS:
            return []
        candidates.remove(victim)
        victims.append(victim.sequence)
        held[victim.sequence.request.tenant] -= 1
        max_cost -= victim.cost
        missing -= victim.gain
    return victims


def _freed(one: Sequence, prefix: set[int], tables: BlockTables) -> int:
    """Blocks that come free with a sequence; those that the urgent one shares with it stay in use."""
    return tables.blocks.num_freed_by(block for block in one.block_table if block not in prefix)


def _next_victim(candidates: list[_Candidate], urgent: Sequence, held: Counter[str], missing: int) -> _Candidate | None:
    allowed = [one for one in candidates if _keeps_shares(one.sequence, urgent, held)]
    enough = [one for one in allowed if one.gain >= missing]
    if enough:
        return min(enough, key=lambda one: one.cost)
    return max(allowed, key=lambda one: one.gain, default=None)


def _keeps_shares(one: Sequence, urgent: Sequence, held: Counter[str]) -> bool:
    theirs, ours = one.request, urgent.request
    return theirs.tenant == ours.tenant or held[theirs.tenant] / theirs.weight > held[ours.tenant] / ours.weight
