"""From the configuration's group `scheduling` to a waiting line. The step loop and the simulator call it."""

from __future__ import annotations

from collections.abc import Callable

from paceline_server.config import SchedulingConfig, TiersConfig
from paceline_server.engine.interface import Tier
from paceline_server.engine.preference import CachedTokens
from paceline_server.engine.queue import OrderedLine, WaitingLine, by_arrival, by_priority, by_size
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.slo import SloLine

_ORDERS: dict[str, Callable[[Sequence], float]] = {"fcfs": by_arrival, "priority": by_priority, "sjf": by_size}


def waiting_line(scheduling: SchedulingConfig, cached_tokens: CachedTokens) -> WaitingLine:
    """An empty line of the configured policy.

    Args:
        cached_tokens: looks into the prefix cache; `slo` prefers what is cached among equals.
    """
    if scheduling.policy == "slo":
        return SloLine(ttft_targets(scheduling.tiers), scheduling.promote_after_seconds, cached_tokens)
    return OrderedLine(_ORDERS[scheduling.policy], ranks=scheduling.policy == "priority")


def ttft_targets(tiers: TiersConfig) -> dict[Tier, float]:
    """Seconds to the first token that each tier is held to."""
    return {
        Tier.INTERACTIVE: tiers.interactive.ttft_ms / 1e3,
        Tier.STANDARD: tiers.standard.ttft_ms / 1e3,
        Tier.BATCH: tiers.batch.ttft_ms / 1e3,
    }


def tpot_targets(tiers: TiersConfig) -> dict[Tier, float]:
    """Seconds per output token that a tier is held to, for those that have a target."""
    targets = {
        Tier.INTERACTIVE: tiers.interactive.tpot_ms,
        Tier.STANDARD: tiers.standard.tpot_ms,
        Tier.BATCH: tiers.batch.tpot_ms,
    }
    return {tier: target / 1e3 for tier, target in targets.items() if target is not None}
