"""Which running sequence gives its slot to a request whose deadline is near. The scheduler asks when no slot is free.

Only one of a lower tier does, and never the oldest, which has to finish. What is thrown away is bounded, and so is how
often it happens to one sequence. Tenants keep their shares: a slot goes to another sequence of the same tenant, or to a
tenant that holds less by weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ordered

from paceline_server.engine.blocks import BlockManager
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.tenant_line import RANKS

MAX_YIELDS = 2
"""Times that a sequence gives its slot to a more urgent one."""


def cheapest_victim(
    urgent: Sequence, running: Ordered[Sequence], blocks: BlockManager, max_lost: int
) -> Sequence | None:
    """The one with least to compute anew of those in whose place the urgent one fits; None where there is none.

    Args:
        urgent: waits and holds no blocks.
        running: in order of admission.
        blocks: of which one must stay free for each that goes on running.
        max_lost: tokens that may have been computed for nothing.
    """
    held = Counter(one.request.tenant for one in running)
    needed = blocks.blocks_for(urgent.num_tokens) + len(running) - 1
    may_yield = (one for one in running[1:] if one.num_computed <= max_lost and _yields_to(one, urgent, held))
    cheapest_first = sorted(may_yield, key=lambda one: one.num_computed)
    fitting = (one for one in cheapest_first if blocks.num_free + blocks.num_freed_by(one.block_table) >= needed)
    return next(fitting, None)


def _yields_to(one: Sequence, urgent: Sequence, held: Counter[str]) -> bool:
    """Whether tiers, tenants and what it has yielded before allow it."""
    theirs, ours = one.request, urgent.request
    if one.yields == MAX_YIELDS or RANKS[theirs.tier] <= RANKS[ours.tier]:
        return False
    return theirs.tenant == ours.tenant or held[theirs.tenant] / theirs.weight > held[ours.tenant] / ours.weight
