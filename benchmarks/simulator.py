"""The simulator beside the real engine: the same trace, on the model and on a machine of the costs that it showed.

    python -m benchmarks.simulator [--quick]

The engine runs a trace in real time, and the times of its steps give the costs of a machine; the simulator runs the
same trace on that. Writes benchmarks/results/simulator.json:

- `ttft_error`: relative error of the simulated mean time to the first token.
- `throughput_error`: of the simulated output tokens per second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import getpid
from random import Random
from statistics import mean, median

from benchmarks.machine import OthersMeter
from benchmarks.pages import fill
from benchmarks.real_engine import MODEL, TimedRunner, Timing, machine_of, pool, run, timed_core
from benchmarks.results import write_rows
from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.simulator.driver import Outcome, Simulation
from paceline_server.simulator.trace import TraceRequest

LIMITS = SchedulerLimits(max_batch_size=16, max_tokens_in_batch=256)
RATE = 2.5


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run, in seconds and tokens per second."""

    seed: int
    ttft: float
    ttft_simulated: float
    throughput: float
    throughput_simulated: float
    fixed: float
    by_token: float
    by_pair: float
    others_cores: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of time to the first token and throughput."""
        return abs(self.ttft_simulated / self.ttft - 1.0), abs(self.throughput_simulated / self.throughput - 1.0)


def trace(rate: float, count: int, seed: int) -> list[TraceRequest]:
    """Requests that come at random, prompts of 20 to 200 tokens, answers of 8 to 48."""
    random, now, requests = Random(seed), 0.0, []
    for _ in range(count):
        now += random.expovariate(rate)
        prompt, output = random.randrange(20, 200), random.randrange(8, 48)
        requests.append(TraceRequest(arrival=now, prompt_tokens=prompt, output_tokens=output))
    return requests


def measure(core: EngineCore, runner: TimedRunner, requests: Sequence[TraceRequest], seed: int) -> Result:
    """Run a trace on both."""
    others, before = OthersMeter([getpid()]), _overhead(core)
    runner.steps.clear()
    timings = run(core, requests)
    others_cores = others.read()
    machine = machine_of(runner.steps, (_overhead(core) - before) / len(runner.steps))
    outcomes = Simulation(requests, machine, pool(core), LIMITS, SchedulingConfig(admission="none")).run()
    return Result(
        seed=seed,
        ttft=mean(one.ttft for one in timings),
        ttft_simulated=mean(one.ttft for one in outcomes if one.ttft is not None),
        throughput=_throughput(timings),
        throughput_simulated=_simulated_throughput(outcomes),
        fixed=machine.fixed,
        by_token=machine.by_token,
        by_pair=machine.by_pair,
        others_cores=others_cores,
    )


def _overhead(core: EngineCore) -> float:
    """Seconds so far of the steps' parts that the runner does not see."""
    return sum(seconds for stage, seconds in core.stats().stage_seconds.items() if stage != "execute")


def _throughput(timings: Sequence[Timing]) -> float:
    return sum(len(one.tokens) for one in timings) / max(one.tokens[-1] for one in timings)


def _simulated_throughput(outcomes: Sequence[Outcome]) -> float:
    ends = [one.request.arrival + one.end for one in outcomes if one.end is not None]
    return sum(one.tokens for one in outcomes) / max(ends)


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description="The simulator beside the real engine")
    parser.add_argument("--quick", action="store_true", help="one short trace; writes nothing")
    quick = parser.parse_args().quick
    core, runner = timed_core(LIMITS)
    run(core, trace(100.0, 12, seed=0))  # the pacer knows the costs of steps afterwards, as it does in the simulator
    count, seeds = (20, [1]) if quick else (60, [1, 2, 3])
    results = [measure(core, runner, trace(RATE, count, seed), seed) for seed in seeds]
    for result in results:
        print(result, result.errors)
    ttft, throughput = (median(one.errors[which] for one in results) for which in (0, 1))
    print(f"ttft_error {ttft:.3f}, throughput_error {throughput:.3f}")
    if not quick:
        workload = {"model": MODEL, "dtype": "float32", "limits": asdict(LIMITS), "requests_per_second": RATE}
        ratios = {"ttft_error": ttft, "throughput_error": throughput}
        print(write_rows("simulator", workload, [asdict(one) for one in results], ratios))
        print(fill("simulator"))


if __name__ == "__main__":
    main()
