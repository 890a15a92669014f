"""Continuous batching against batches by request: one seeded trace, 16 clients, the same runner.

    python -m benchmarks.batching [--quick]

Four ways to batch: continuous; dynamic (a batch runs to its end, members leave it); static (members are held to the
end), with prompts packed and, as batchers without packing do, padded. Each is given what suits it: batches by request
take as many prompt tokens as 16 clients can send, and wait up to 20 ms for company; continuous steps hold 512 tokens.
Writes benchmarks/results/batching.json, the table of docs/batching.md and its chart. `continuous_over_static` is over
the padded one, which is what the name stands for; `continuous_over_static_packed` leaves the padding tax out.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from os import getpid
from typing import Any

from benchmarks.bars import Chart, draw
from benchmarks.clients import mixed_jobs, run_clients
from benchmarks.machine import OthersMeter, float_format
from benchmarks.pages import DOCS, batching_table, fill
from benchmarks.real_engine import MODEL, load_model
from benchmarks.results import NOISY_CORES, median_rows, write_rows
from paceline_server.config import SchedulingConfig
from paceline_server.engine.batchers import Batcher, Batching
from paceline_server.engine.core import EngineCore
from paceline_server.engine.loop import Loaded
from paceline_server.engine.scheduler import SchedulerLimits

CLIENTS = 16
STEPS = SchedulerLimits(max_batch_size=CLIENTS, max_tokens_in_batch=512)
REQUESTS = SchedulerLimits(max_batch_size=CLIENTS, max_tokens_in_batch=CLIENTS * 512)
_DELAY = 0.02  # answers that end together bring requests that come together
BATCHERS: dict[str, tuple[Batching, SchedulerLimits]] = {
    "continuous": (Batching(), STEPS),
    "dynamic": (Batching(Batcher.DYNAMIC, max_delay=_DELAY), REQUESTS),
    "static, packed": (Batching(Batcher.STATIC, max_delay=_DELAY), REQUESTS),
    "static, padded": (Batching(Batcher.STATIC, packed=False, max_delay=_DELAY), REQUESTS),
}


def make_core(loaded: Loaded, batching: Batching, limits: SchedulerLimits) -> EngineCore:
    """A fresh core on a loaded model; one at a time, because they share its KV cache."""
    scheduling = SchedulingConfig(policy="fcfs", admission="none")
    return EngineCore(loaded.runner, loaded.info, limits, scheduling, prefix_caching=False, batching=batching)


def measure(loaded: Loaded, count: int, rounds: int) -> list[dict[str, Any]]:
    """Run every batcher on the same requests, in turns; one row a run."""
    jobs = mixed_jobs(count, loaded.info.vocab_size)
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        for name, (batching, limits) in BATCHERS.items():
            others = OthersMeter([getpid()])
            run = run_clients(make_core(loaded, batching, limits), jobs, CLIENTS)
            cores = others.read()
            facts = {"batcher": name, "round": number, "others_cores": cores, "noisy": cores > NOISY_CORES}
            rows.append(facts | asdict(run) | {"wasted": run.wasted})
            print(f"round {number} {name}: {run.output_tokens_per_second:.0f} tok/s", flush=True)
    return rows


def main() -> None:
    """Measure, print the table; write the result file, the page's table and the chart."""
    parser = argparse.ArgumentParser(description="Continuous, dynamic and static batches on one trace")
    parser.add_argument("--quick", action="store_true", help="one round of few requests; writes nothing")
    quick = parser.parse_args().quick
    count, rounds = (24, 1) if quick else (48, 2)
    rows = measure(load_model(float_format()), count, rounds)
    print(batching_table({"runs": rows}))
    if not quick:
        _write(rows, count)


def _write(rows: list[dict[str, Any]], count: int) -> None:
    typical = median_rows(rows, "batcher", "output_tokens_per_second")
    rate = {name: run["output_tokens_per_second"] for name, run in typical.items()}
    ratios = {
        "continuous_over_static": rate["continuous"] / rate["static, padded"],
        "continuous_over_static_packed": rate["continuous"] / rate["static, packed"],
        "continuous_over_dynamic": rate["continuous"] / rate["dynamic"],
    }
    workload = {"model": MODEL, "dtype": float_format(), "clients": CLIENTS, "requests": count, "outputs": "16..256"}
    print(write_rows("batching", workload, rows, ratios), ratios)
    charts = [
        Chart("Output tokens per second", rate),
        Chart("Time to the first token, median", {name: run["ttft_p50"] for name, run in typical.items()}, "s"),
        Chart("Token slots computed for nothing", {name: 100 * run["wasted"] for name, run in typical.items()}, "%"),
    ]
    print(draw(charts, DOCS / "batching.svg"), fill("batching"))


if __name__ == "__main__":
    main()
