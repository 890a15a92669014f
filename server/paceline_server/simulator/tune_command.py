"""`paceline-server tune TRACE`: which batch size and token budget does a recorded trace want? `cli` registers it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from paceline_server.errors import InvalidConfiguration
from paceline_server.simulator import arguments as options
from paceline_server.simulator.plot import frontier_svg
from paceline_server.simulator.progress import Progress
from paceline_server.simulator.queueing import Workload
from paceline_server.simulator.trace import read
from paceline_server.simulator.tune import (
    LEAST_CHECKED,
    Candidate,
    Checked,
    candidates,
    check,
    delay_seconds,
    frontier,
    propose,
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `tune`."""
    parser = commands.add_parser(
        "tune",
        help="propose batch size and token budget for a recorded trace",
        description="Predict waiting and capacity of a trace by queueing theory, check that on the simulator, and "
        "propose settings (docs/reference/simulate.md).",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file of requests, JSON lines")
    options.add_machine(parser)
    parser.add_argument(
        "--longest-step-ms",
        type=options.not_negative,
        default=100.0,
        metavar="X",
        help="longest that an answer may stall for others' prompts",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the frontier as SVG")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.set_defaults(run=tune)


def tune(arguments: argparse.Namespace) -> int:
    """Print the frontier and a proposal; returns the exit code."""
    trace = read(arguments.trace)
    if len(trace) < LEAST_CHECKED:
        print(
            f"warning: {arguments.trace} has {len(trace)} requests, and so few say little about a load: "
            f"record {LEAST_CHECKED} or more",
            file=sys.stderr,
        )
    work, machine, pool = Workload.of(trace), options.machine(arguments), options.pool(arguments, trace)
    if machine.fixed <= 0.0:
        raise InvalidConfiguration("--step-ms must be above 0: a step that costs nothing by itself needs no batches")
    found = candidates(work, machine, pool)
    best = frontier(found)
    proposed = propose(best, found, work, arguments.longest_step_ms / 1e3)
    shown = best if proposed in best else [*best, proposed]
    checked = []
    with Progress(sys.stderr) as progress:
        for number, one in enumerate(shown, start=1):
            progress.show(f"simulating {number} of {len(shown)}: {_batching(one)}")
            checked.append(check(one, trace, machine, pool))
    settings = _settings(proposed, delay_seconds(work, machine))
    if arguments.plot is not None:
        _write_plot(arguments.plot, found, best, proposed)
    if arguments.json:
        print(json.dumps({"workload": asdict(work), "frontier": [_row(one) for one in checked], "proposed": settings}))
    else:
        print(_text(work, checked, settings))
    return 0


def _batching(one: Candidate) -> str:
    return f"max_batch_size {one.limits.max_batch_size}, max_tokens_in_batch {one.limits.max_tokens_in_batch}"


def _settings(proposed: Candidate, delay: float) -> dict[str, int]:
    limits = proposed.limits
    return {
        "max_batch_size": limits.max_batch_size,
        "max_tokens_in_batch": limits.max_tokens_in_batch,
        "max_queue_delay_us": round(1e6 * delay),
    }


def _row(one: Checked) -> dict[str, Any]:
    limits, prediction = one.candidate.limits, one.candidate.prediction
    ttft = prediction.ttft if isfinite(prediction.ttft) else None
    return {
        "max_batch_size": limits.max_batch_size,
        "max_tokens_in_batch": limits.max_tokens_in_batch,
        "longest_step": prediction.longest_step,
        "ttft_predicted": ttft,
        "ttft_simulated": one.ttft,
        "capacity_predicted": prediction.capacity,
        "capacity_simulated": one.capacity,
    }


def _text(work: Workload, checked: Sequence[Checked], settings: dict[str, int]) -> str:
    lines = [
        f"{work.rate:.2f} requests/s, {work.prompt.mean:.0f} prompt tokens to compute and "
        f"{work.output.mean:.0f} output tokens each, {work.rate * work.output.mean:.0f} output tokens/s",
        "",
        "| max_batch_size | max_tokens_in_batch | longest step | TTFT expected | simulated "
        "| tok/s at most expected | simulated |",
        "|---|---|---|---|---|---|---|",
        *(_table_row(_row(one)) for one in checked),
    ]
    proposal = [f"  {name}: {value}" for name, value in settings.items()]
    fields = "In an LLMService: maxBatchSize, maxTokensInBatch and maxQueueDelayUs of spec.engine."
    return "\n".join([*lines, "", "batching:", *proposal, "", fields])


def _table_row(row: dict[str, Any]) -> str:
    ttft = "grows" if row["ttft_predicted"] is None else f"{1e3 * row['ttft_predicted']:.0f} ms"
    capacity = "too few requests" if row["capacity_simulated"] is None else f"{row['capacity_simulated']:.0f}"
    return (
        f"| {row['max_batch_size']} | {row['max_tokens_in_batch']} | {1e3 * row['longest_step']:.0f} ms | {ttft} "
        f"| {1e3 * row['ttft_simulated']:.0f} ms | {row['capacity_predicted']:.0f} | {capacity} |"
    )


def _write_plot(path: Path, found: Sequence[Candidate], best: Sequence[Candidate], proposed: Candidate) -> None:
    stable = [one for one in found if isfinite(one.prediction.ttft)]
    if not stable:
        raise InvalidConfiguration(f"nothing to plot in {path}: no settings carry the trace on this machine")
    try:
        path.write_text(frontier_svg(stable, best, proposed), encoding="utf-8")
    except OSError as error:
        raise InvalidConfiguration(f"cannot write {path}: {error}") from None
