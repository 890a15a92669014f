"""What a run of the simulator comes to: a row of figures by tier, and over all. `command` and the benchmarks use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from paceline_server.engine.interface import FinishReason, Tier
from paceline_server.simulator.driver import Outcome


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of the requests of one tier, or of all.

    Attributes:
        refused: share that was not taken.
        timed_out: share of those taken that ran out of their own time.
        met: share of those taken whose first token came within their tier's target.
        forecast_error: median over those taken of |predicted - actual| / actual time to the first token.
        tokens: generated.
    """

    tier: str
    requests: int
    refused: float
    timed_out: float
    met: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    tpot_p50: float
    forecast_error: float
    tokens: int


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def rows(outcomes: Sequence[Outcome], targets: Mapping[Tier, float]) -> list[Row]:
    """One row for each tier that occurs, and one for all.

    Args:
        targets: seconds to the first token by tier.
    """
    by_tier = {tier: [one for one in outcomes if one.request.tier is tier] for tier in Tier}
    found = [_row(tier.value, some, targets) for tier, some in by_tier.items() if some]
    return [*found, _row("all", outcomes, targets)]


def table(found: Sequence[Row], title: str) -> str:
    """Markdown, times in milliseconds."""
    lines = [
        f"| {title} | requests | refused | timed out | in time | TTFT p50 / p95 / p99 ms | TPOT p50 ms "
        "| forecast error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ttft = " / ".join(f"{1e3 * value:.0f}" for value in (row.ttft_p50, row.ttft_p95, row.ttft_p99))
        lines.append(
            f"| {row.tier} | {row.requests} | {row.refused:.1%} | {row.timed_out:.1%} | {row.met:.1%} | {ttft} "
            f"| {1e3 * row.tpot_p50:.1f} | {row.forecast_error:.1%} |"
        )
    return "\n".join(lines)


def as_json(found: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain data."""
    return [asdict(row) for row in found]


def met(outcome: Outcome, targets: Mapping[Tier, float]) -> bool:
    """Whether the first token came within the tier's target."""
    return outcome.ttft is not None and outcome.ttft <= targets[outcome.request.tier]


def forecast_errors(outcomes: Sequence[Outcome]) -> list[float]:
    """|predicted - actual| / actual of those that started and for which something had been predicted."""
    return [
        abs(one.predicted_ttft - one.ttft) / one.ttft
        for one in outcomes
        if one.refusal is None and one.ttft and one.predicted_ttft is not None
    ]


def _row(name: str, outcomes: Sequence[Outcome], targets: Mapping[Tier, float]) -> Row:
    taken = [one for one in outcomes if one.refusal is None]
    ttft = [one.ttft for one in taken if one.ttft is not None]
    return Row(
        tier=name,
        requests=len(outcomes),
        refused=1.0 - len(taken) / len(outcomes),
        timed_out=_share(one.finish is FinishReason.TIMEOUT for one in taken),
        met=_share(met(one, targets) for one in taken),
        ttft_p50=quantile(ttft, 0.50),
        ttft_p95=quantile(ttft, 0.95),
        ttft_p99=quantile(ttft, 0.99),
        tpot_p50=quantile([one.tpot for one in taken if one.tpot is not None], 0.50),
        forecast_error=quantile(forecast_errors(outcomes), 0.50),
        tokens=sum(one.tokens for one in taken),
    )


def _share(truths: Iterable[bool]) -> float:
    found = list(truths)
    return sum(found) / len(found) if found else 0.0
