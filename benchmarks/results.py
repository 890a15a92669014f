"""Result files: benchmarks/results/NAME.json, and the Markdown table made from one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load import Figures
from benchmarks.machine import facts

FOLDER = Path(__file__).parent / "results"
NOISY_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one server: its figures, its start and memory, and the cores that others used meanwhile."""

    server: str
    version: str
    round: int
    figures: Figures
    start_seconds: float
    rss_mib: float
    others_cores: float
    noisy: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "noisy", self.others_cores > NOISY_CORES)


def counted(runs: Sequence[Run], server: str, clients: int) -> list[Run]:
    """The runs of a server that its medians are made of: the quiet ones, or all where none was quiet."""
    own = [run for run in runs if run.server == server and run.figures.clients == clients]
    return [run for run in own if not run.noisy] or own


def median_of(runs: Sequence[Run], server: str, clients: int, figure: str) -> float:
    """Median of one figure over the runs that count."""
    return float(median(getattr(run.figures, figure) for run in counted(runs, server, clients)))


def write(name: str, workload: Mapping[str, Any], runs: Sequence[Run], ratios: Mapping[str, float]) -> Path:
    """Write the result file of served runs; returns its path."""
    return write_rows(name, workload, [asdict(run) for run in runs], ratios)


def write_rows(
    name: str, workload: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float]
) -> Path:
    """Write a result file; returns its path.

    Args:
        rows: figures of any kind, one mapping a run.
    """
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    content = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": facts(),
        "workload": workload,
        "runs": list(rows),
        "ratios": {key: round(value, 3) for key, value in ratios.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def table(runs: Sequence[Run]) -> str:
    """Markdown: a row for each server and number of clients, medians with the range of the throughput."""
    lines = [
        "| server | clients | output tok/s (min–max) | TTFT p50 / p99 | ITL p50 / p99 | start | RSS | errors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for server, clients in dict.fromkeys((run.server, run.figures.clients) for run in runs):
        own = counted(runs, server, clients)
        rate = [run.figures.output_tokens_per_second for run in own]
        middle = {key: median_of(runs, server, clients, key) for key in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")}
        lines.append(
            f"| {server} | {clients} | {median(rate):.0f} ({min(rate):.0f}–{max(rate):.0f}) "
            f"| {middle['ttft_p50']:.2f} / {middle['ttft_p99']:.2f} s "
            f"| {middle['itl_p50'] * 1e3:.0f} / {middle['itl_p99'] * 1e3:.0f} ms "
            f"| {median(run.start_seconds for run in own):.1f} s | {median(run.rss_mib for run in own):.0f} MiB "
            f"| {sum(run.figures.errors for run in own)} |"
        )
    return "\n".join(lines)
