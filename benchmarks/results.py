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
    """One run of one server.

    Attributes:
        workload: its letter or name.
        start_seconds: from the server's start until it could serve.
        rss_mib: of its process tree, after the run.
        others_cores: cores that neither server nor clients used, by others meanwhile.
        client_cores: cores that the clients used.
        spans: of each request, when it was sent, had its first token and ended, in seconds from the run's begin.
    """

    server: str
    version: str
    workload: str
    round: int
    figures: Figures
    start_seconds: float
    rss_mib: float
    others_cores: float
    client_cores: float
    spans: tuple[tuple[float, float, float], ...] = ()
    noisy: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "noisy", self.others_cores > NOISY_CORES)


def counted(runs: Sequence[Run], server: str, workload: str) -> list[Run]:
    """The runs of a server that its medians are made of: the quiet ones, or all where none was quiet.

    A run in which requests failed has done less than the others, and counts nowhere.
    """
    own = [run for run in runs if (run.server, run.workload, run.figures.errors) == (server, workload, 0)]
    return [run for run in own if not run.noisy] or own


def median_of(runs: Sequence[Run], server: str, workload: str, figure: str) -> float:
    """Median of one figure, of the run or of its `figures`, over the runs that count.

    Raises:
        StatisticsError: no run of this workload by the server counts.
    """
    own = counted(runs, server, workload)
    return float(median(getattr(run if hasattr(run, figure) else run.figures, figure) for run in own))


def write(name: str, workload: Mapping[str, Any], runs: Sequence[Run], ratios: Mapping[str, float]) -> Path:
    """Write the result file of served runs; returns its path."""
    return write_rows(name, workload, [asdict(run) for run in runs], ratios)


def earlier(name: str) -> tuple[dict[str, Any], list[Run]]:
    """What a result file of `write` says of its workloads, and its runs; nothing where there is none.

    Raises:
        RuntimeError: it is of another machine, or of other versions: figures of both would not compare.
    """
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return {}, []
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["machine"] != facts():
        raise RuntimeError(f"{path} is of another machine or other versions: measure without it")
    return result["workload"], read_runs(result)


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
        "ratios": {key: round(value, 4) for key, value in ratios.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def median_rows(rows: Sequence[Mapping[str, Any]], group: str, figure: str) -> dict[str, Mapping[str, Any]]:
    """Of rows that `write_rows` wrote: by group, the one with the median figure among the quiet ones, or among all."""
    found = {}
    for name in dict.fromkeys(row[group] for row in rows):
        own = [row for row in rows if row[group] == name]
        ordered = sorted([row for row in own if not row["noisy"]] or own, key=lambda row: row[figure])
        found[name] = ordered[len(ordered) // 2]
    return found


def read_runs(result: Mapping[str, Any]) -> list[Run]:
    """The runs of a result file that `write` has written."""
    return [_read_run(run) for run in result["runs"]]


def _read_run(fields: Mapping[str, Any]) -> Run:
    typed = {"figures": Figures(**fields["figures"]), "spans": tuple(map(tuple, fields["spans"]))}
    return Run(**{key: value for key, value in fields.items() if key != "noisy"} | typed)


def table(runs: Sequence[Run]) -> str:
    """Markdown: a row for each workload and server, medians with the range of the throughput."""
    lines = [
        "| workload | server | output tok/s (min–max) | TTFT p50 / p99 | ITL p50 / p99 | start | RSS | errors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = sorted(dict.fromkeys((run.workload, run.server) for run in runs), key=lambda row: row[0])
    return "\n".join([*lines, *(_row(runs, server, workload) for workload, server in rows)])


def _row(runs: Sequence[Run], server: str, workload: str) -> str:
    own = counted(runs, server, workload)
    errors = sum(run.figures.errors for run in runs if (run.server, run.workload) == (server, workload))
    if not own:
        return f"| {workload} | {server} | requests failed in every run | | | | | {errors} |"
    rate = [run.figures.output_tokens_per_second for run in own]
    middle = {key: median_of(runs, server, workload, key) for key in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")}
    noise = " (noisy)" if all(run.noisy for run in own) else ""
    return (
        f"| {workload} | {server}{noise} | {median(rate):.0f} ({min(rate):.0f}–{max(rate):.0f}) "
        f"| {middle['ttft_p50']:.2f} / {middle['ttft_p99']:.2f} s "
        f"| {middle['itl_p50'] * 1e3:.0f} / {middle['itl_p99'] * 1e3:.0f} ms "
        f"| {median(run.start_seconds for run in own):.1f} s | {median(run.rss_mib for run in own):.0f} MiB "
        f"| {errors} |"
    )
