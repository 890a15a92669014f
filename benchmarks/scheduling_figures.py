"""What the benchmarks of scheduling come to, beside what was wanted: the tables of docs/scheduling.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIGURES = {
    "overload": {
        "prediction_median_abs_error": ("median error of the forecast at twice the capacity", "≤ 0.25"),
        "refused_would_miss": ("of those refused, share that would have missed", "≥ 0.90"),
        "admitted_met": ("of those admitted, share in time", "≥ 0.95"),
        "fcfs_met": ("share in time under fcfs without admission", "< 0.50"),
    },
    "fairness": {
        "victim_ttft_p95": ("p95 TTFT beside a tenant with ten times its share, over that without", "≤ 1.5"),
        "jain": ("Jain's index of tokens served to tenants with work waiting", "≥ 0.95"),
    },
    "scheduler_cost": {
        "waiting_100k_over_1k": ("a decision with 100,000 waiting over one with 1,000", "≤ 1.5"),
        "share_of_step": ("share of a real step with 16 running that deciding takes", "≤ 0.03"),
        "bytes_per_waiting": ("bytes that the scheduler adds to a waiting request", "bounded"),
    },
    "simulator": {
        "ttft_error": ("error of the simulated mean TTFT against the real engine", "≤ 0.15"),
        "throughput_error": ("error of the simulated throughput", "≤ 0.15"),
    },
}
"""By result file and ratio: what it is, and what was wanted."""


def scheduling_table(result: Mapping[str, Any]) -> str:
    """A row for each ratio of one result."""
    lines = ["| figure | measured | wanted |", "|---|---|---|"]
    for key, (what, wanted) in FIGURES[result["name"]].items():
        lines.append(f"| {what} (`{key}`) | {result['ratios'][key]:g} | {wanted} |")
    return "\n".join(lines)
