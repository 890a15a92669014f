"""How many prompt tokens a step may compute beside those that generate, and whose. The scheduler asks once a step.

A long chunk of a prompt makes everybody who generates wait for it. Where the tiers of those have a target for the time
per output token, the chunk is what fits into that time by the measured cost of a step (`steptime`).

Prompts of about one length are computed one after the other: to share the steps would end none of them sooner and most
of them later. A long one shares with those that are much shorter, so that it does not keep them from their first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from paceline_server.engine.interface import Tier
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.steptime import StepTimeModel

MIN_CHUNK = 16
"""Prompt tokens that a step may always compute: a target that is missed anyway must not stop the prompts."""

MUCH_SHORTER = 2
"""How many times longer than somebody behind it a prompt is that gives half of the step away."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt under way.

    Attributes:
        remaining: tokens still to compute.
        shares: whether it gives half of the step to much shorter ones behind it.
    """

    remaining: int
    shares: bool = True


def divide(budget: int, prefills: Series[Prefill], waiting: float) -> list[int]:
    """Tokens of this step for each prompt.

    The first gets at least half of the step, so each prompt makes progress once those before it are done.

    Args:
        budget: tokens for all of them; what is not given is for those that wait.
        prefills: in the order in which they are served.
        waiting: tokens of the shortest prompt that may be admitted in this step; infinite where there is none.
    """
    sizes = [one.remaining for one in prefills]
    shortest = list(accumulate([waiting, *sizes[:0:-1]], min))[::-1]  # of those behind each
    wanted = list(accumulate([budget if waiting < inf else 0, *sizes[:0:-1]]))[::-1]  # by those behind each
    counts = []
    for prefill, short, others in zip(prefills, shortest, wanted, strict=True):
        gives = prefill.shares and prefill.remaining >= MUCH_SHORTER * short
        counts.append(min(prefill.remaining, max(-(-budget // 2), budget - others) if gives else budget))
        budget -= counts[-1]
    return counts


class Pacer:
    """Sizes the prefill of a step.

    Args:
        model: what steps cost; it goes on learning.
        tpot_targets: seconds per output token by tier; a tier that is missing has no target.
    """

    def __init__(self, model: StepTimeModel, tpot_targets: Mapping[Tier, float]) -> None:
        self._model = model
        self._targets = tpot_targets

    def prefill_tokens(self, decoding: Iterable[Sequence], position: int, budget: int) -> int:
        """Prompt tokens for this step.

        Args:
            decoding: those that get their next token in this step.
            position: where the first prompt that will be computed stands: its tokens attend to that many before them.
            budget: the most that may come out.
        """
        target, tokens, pairs = None, 0, 0
        for sequence in decoding:
            tokens += 1
            pairs += sequence.num_tokens
            limit = self._targets.get(sequence.request.tier)
            if limit is not None and (target is None or limit < target):
                target = limit
        if target is None or not self._model.known:
            return budget
        _, by_token, by_pair = self._model.coefficients
        left = target - self._model.seconds(tokens, pairs)
        return min(budget, max(MIN_CHUNK, _chunk(left, by_token + by_pair * position, by_pair / 2, budget)))


def _chunk(seconds: float, by_token: float, by_square: float, limit: int) -> int:
    """The largest n up to `limit` with by_token·n + by_square·n² <= seconds; at least 0."""
    if seconds <= 0.0:
        return 0
    if by_token * limit + by_square * limit**2 <= seconds:
        return limit
    if by_square * seconds < 1e-9 * by_token**2:  # as good as linear
        return int(seconds / by_token)
    root: float = (by_token**2 + 4.0 * by_square * seconds) ** 0.5
    return int((root - by_token) / (2.0 * by_square))
