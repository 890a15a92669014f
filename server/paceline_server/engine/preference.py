"""Which of several sequences that are equally due goes first: the one of whose prompt most is cached.

The `slo` line asks. A cached prefix saves work only while its blocks are there: those that share it had better go
while it is, before other prompts evict it. Longest shared prefix first is the order of SGLang's cache-aware scheduling
(Zheng et al., 2024), which lets others starve; here one of equals is overtaken a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered

from paceline_server.engine.sequence import Sequence

MAX_OVERTAKEN = 4
"""Times that one of equals lets another one go first."""

CachedTokens = Callable[[Sequence], int]
"""Tokens of a waiting sequence that the prefix cache would bring now."""


def prefer_cached(equals: Ordered[Sequence], cached_tokens: CachedTokens) -> Sequence:
    """The one with most cached tokens, which is going to be taken; those before it note that they were overtaken.

    Args:
        equals: at least one, in the order in which they go if as much is cached of each.
    """
    at_bound = (place for place, one in enumerate(equals) if one.overtaken >= MAX_OVERTAKEN)
    candidates = equals[: next(at_bound, len(equals) - 1) + 1]
    if len(candidates) == 1:  # looking the prefix up is the dear part
        return candidates[0]
    best = max(candidates, key=cached_tokens)
    for one in candidates[: candidates.index(best)]:
        one.overtaken += 1
    return best
