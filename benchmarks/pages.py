"""Tables of documentation pages, made from result files: a page has a marked place for each.

    python -m benchmarks.pages          # renews all of them; the benchmarks do so themselves

Where nothing was measured yet the place is empty. A test holds the pages to the files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.claims import rows as claims
from benchmarks.results import FOLDER, Run, counted, median_rows, read_runs
from benchmarks.scheduling_figures import FIGURES, scheduling_table

DOCS = FOLDER.parents[1] / "docs"
Result = Mapping[str, Any]


def claims_table(result: Result) -> str:
    """Technique, claim and what came out here."""
    lines = ["| technique | claimed | source | here | of what |", "|---|---|---|---|---|"]
    for claim in claims.CLAIMS:
        if claim.key in result["ratios"]:
            ours = f"**{result['ratios'][claim.key]:.3g}x**"
            lines.append(f"| {claim.technique} | {claim.claimed} | {claim.source} | {ours} | {claim.ours} |")
    return "\n".join(lines)


def batching_table(result: Result) -> str:
    """A row for each batcher, its run of median throughput; and the chart."""
    lines = ["| batcher | tok/s | TTFT p50 / p99 s | e2e p50 s | sequences a step | token slots for nothing |"]
    lines.append("|---" * 6 + "|")
    for name, run in median_rows(result["runs"], "batcher", "output_tokens_per_second").items():
        lines.append(
            f"| {name} | {run['output_tokens_per_second']:.0f} | {run['ttft_p50']:.2f} / {run['ttft_p99']:.2f} "
            f"| {run['e2e_p50']:.2f} | {run['sequences_per_step']:.1f} | {run['wasted']:.0%} |"
        )
    return "\n".join([*lines, "", "![the same as bars](batching.svg)"])


def accuracy_table(result: Result) -> str:
    """A row for each number format."""
    lines = ["| weights and KV cache | perplexity over float32's | equal greedy tokens |", "|---|---|---|"]
    for run in result["runs"]:
        name = run["format"].replace("_", " ")
        lines.append(f"| {name} | {run['perplexity_over_float32']:.4f} | {run['equal_greedy_tokens']:.1%} |")
    tokens = result["workload"]["tokens"]
    return "\n".join([*lines, "", f"Over {tokens} tokens of the help topics that Python carries."])


_THROUGHPUT = {"A": "mixed, 16 clients", "B": "shared prefix, 16", "D": "long prompts, 4", "E": "one client"}
_LATENCY = {"A": "mixed, 16 clients", "C": "one rate for all", "F": "0.7 of its capacity", "D": "long prompts, 4"}


def peers_table(result: Result) -> str:
    """Two tables with a row for each server: throughput by workload; latencies by workload, start and memory."""
    runs = read_runs(result)
    servers = list(dict.fromkeys(run.server for run in runs))
    rounds = Counter((run.server, run.workload) for run in runs).values()
    counts = f"{min(rounds)} to {max(rounds)}" if min(rounds) < max(rounds) else f"{max(rounds)}"
    noisy = " Runs during which others used more than a tenth of a core are left out." if max(rounds) > 1 else ""
    lines = [
        *_rows(runs, servers, "output tokens/s", _THROUGHPUT, _rate),
        "",
        *_rows(runs, servers, "TTFT p50 / p99, ITL p99", _LATENCY, _latency, {"start": _start, "memory": _memory}),
        "",
        f"Medians of {counts} runs (least to most); start and memory are A's.{noisy}{_shares(result['ratios'])}",
    ]
    return "\n".join(lines)


def _shares(ratios: Mapping[str, float]) -> str:
    """What part of our time of A the machine itself would need, by weights."""
    prefix = "A_share_of_roofline_"
    shares = [f"{value:.0%} ({key.removeprefix(prefix)})" for key, value in ratios.items() if key.startswith(prefix)]
    if not shares:
        return ""
    return f" At the rates measured of this machine alone, A would take ours {' and '.join(shares)} of its time."


def _rows(
    runs: Sequence[Run],
    servers: Sequence[str],
    corner: str,
    workloads: Mapping[str, str],
    cell: Callable[[Sequence[Run]], str],
    more: Mapping[str, Callable[[Sequence[Run]], str]] | None = None,
) -> list[str]:
    """A table of one cell for each server and workload; `more` are columns made of A's runs."""
    letters = [letter for letter in workloads if any(run.workload == letter for run in runs)]
    heads = [*(f"{letter}: {workloads[letter]}" for letter in letters), *(more or {})]
    lines = [f"| {corner} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for server in servers:
        version = next(run.version for run in runs if run.server == server)
        cells = [_cell(runs, server, letter, cell) for letter in letters]
        cells += [_cell(runs, server, "A", make) for make in (more or {}).values()]
        lines.append(f"| {server} {version} | {' | '.join(cells)} |")
    return lines


def _cell(runs: Sequence[Run], server: str, letter: str, make: Callable[[Sequence[Run]], str]) -> str:
    """What is made of the runs that count; empty where the server has none of this workload."""
    own = counted(runs, server, letter)
    if own:
        return make(own)
    return "failed" if any((run.server, run.workload) == (server, letter) for run in runs) else ""


def _rate(own: Sequence[Run]) -> str:
    """Median of the throughput with its range."""
    rates = [run.figures.output_tokens_per_second for run in own]
    digits = 0 if median(rates) >= 10 else 1
    return f"**{median(rates):.{digits}f}** ({min(rates):.{digits}f}–{max(rates):.{digits}f})"


def _latency(own: Sequence[Run]) -> str:
    figures = [run.figures for run in own]
    first, last = median(one.ttft_p50 for one in figures), median(one.ttft_p99 for one in figures)
    return f"{first:.2f} / {last:.2f} s, {1e3 * median(one.itl_p99 for one in figures):.0f} ms"


def _start(own: Sequence[Run]) -> str:
    return f"{median(run.start_seconds for run in own):.1f} s"


def _memory(own: Sequence[Run]) -> str:
    return f"{median(run.rss_mib for run in own):.0f} MiB"


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "claims": ("claims.md", claims_table),
    "batching": ("batching.md", batching_table),
    "peers": ("../README.md", peers_table),
    "accuracy": ("performance.md", accuracy_table),
    **dict.fromkeys(FIGURES, ("scheduling.md", scheduling_table)),
}
"""By the name of the result file: its page, and what is made of it."""


def filled(page: str, name: str, result: Result | None) -> str:
    """A page with one of its places renewed."""
    begin, end = f"<!-- made from benchmarks/results/{name}.json -->\n", "<!-- end -->\n"
    head, rest = page.split(begin)
    _, tail = rest.split(end, 1)
    return head + begin + (_with_machine(TABLES[name][1](result), result) if result else "") + end + tail


def read_result(name: str) -> Result | None:
    """A result file, or None where nothing was measured yet."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def fill(name: str) -> Path:
    """Renew a result's table on its page; returns the page's path."""
    path = DOCS / TABLES[name][0]
    path.write_text(filled(path.read_text(encoding="utf-8"), name, read_result(name)), encoding="utf-8")
    return path


def _with_machine(table: str, result: Result) -> str:
    machine = result["machine"]
    return f"{table}\n\n{machine['processor']}, {machine['cores']} cores, {result['date'][:10]}.\n"


if __name__ == "__main__":
    for each in TABLES:
        print(fill(each))
