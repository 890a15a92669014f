"""Twice as much as the engine can do: what admission by forecast is worth, and whether the forecast is right.

    python -m benchmarks.overload [--quick]

Run on the simulator: the same Poisson trace of three tiers, at twice the rate that the pretended machine works off,
under `slo` with admission by target, and under `fcfs` without admission. Writes benchmarks/results/overload.json:

- `prediction_median_abs_error`: of the forecast, over the requests that were taken.
- `refused_would_miss`: share of those refused that miss their target when the whole trace is replayed and nothing is
  refused. `refused_alone_would_miss` is the harder question: the run is forked at the moment of the refusal, and only
  that one request is taken in addition. At the border of what fits, that is the toss of a coin for any forecast.
- `admitted_met`: share of those taken whose first token came within their tier's target; `fcfs_met`: the same of all
  requests under fcfs.
- `goodput_over_fcfs`: tokens of requests that met their target, per second, over those of fcfs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import median

from benchmarks.pages import fill
from benchmarks.results import write_rows
from benchmarks.traces import LIMITS, MACHINE, POOL, at_once, poisson
from paceline_server.config import SchedulingConfig
from paceline_server.engine.policies import ttft_targets
from paceline_server.simulator.driver import Outcome, Simulation
from paceline_server.simulator.report import forecast_errors, met
from paceline_server.simulator.trace import TraceRequest

OVERLOAD = 2.0
TARGETS = ttft_targets(SchedulingConfig().tiers)
_WATCH = 2.0  # a forked run goes on for so many times the target


class Judged(Simulation):
    """A run that forks at some of its refusals, to see what would have become of them.

    Args:
        share: of the refusals to follow; a fork follows none.
    """

    def __init__(self, trace: Sequence[TraceRequest], scheduling: SchedulingConfig, share: float, seed: int) -> None:
        super().__init__(trace, MACHINE, POOL, LIMITS, scheduling, seed)
        self._share = share
        self._random = Random(seed)
        self.would_miss: list[bool] = []

    def submit(self, index: int) -> None:
        """Hand one request to the core; follow it elsewhere if it is refused."""
        super().submit(index)
        if self.outcomes[index].refusal is not None and self._random.random() < self._share:
            self.would_miss.append(self._misses_alone(index))

    def _misses_alone(self, index: int) -> bool:
        fork = self.fork()
        assert isinstance(fork, Judged)
        fork._share = 0.0
        fork.force(index)
        outcome, target = fork.outcomes[index], TARGETS[self.outcomes[index].request.tier]
        while outcome.ttft is None and fork.clock.now < outcome.request.arrival + _WATCH * target:
            fork.advance()
        return not met(outcome, TARGETS)


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one seed."""

    seed: int
    requests: int
    prediction_median_abs_error: float
    refused: float
    refused_would_miss: float
    refused_alone_would_miss: float
    admitted_met: float
    fcfs_met: float
    goodput_over_fcfs: float


def capacity(count: int) -> float:
    """Requests per second that the machine works off when there is always enough to do."""
    trace = at_once(poisson(1.0, count, seed=0))
    run = Simulation(trace, MACHINE, POOL, LIMITS, SchedulingConfig(policy="fcfs", admission="none"))
    while len(run.core.scheduler.waiting) or run.clock.now == 0.0:
        run.advance()  # until the last one has entered: the emptying at the end is not part of it
    return (count - len(run.core.scheduler.running)) / run.clock.now


def measure(rate: float, count: int, seed: int, share: float) -> Result:
    """One trace, under all that is compared."""
    trace = poisson(rate, count, seed)
    judged = Judged(trace, SchedulingConfig(policy="slo", admission="target"), share, seed)
    taken = [one for one in judged.run() if one.refusal is None]
    refused = {index for index, one in enumerate(judged.outcomes) if one.refusal is not None}
    unrefused = _run(trace, "slo", seed)
    fcfs = _run(trace, "fcfs", seed)
    return Result(
        seed=seed,
        requests=count,
        prediction_median_abs_error=median(forecast_errors(taken)),
        refused=len(refused) / count,
        refused_would_miss=sum(not met(unrefused.outcomes[index], TARGETS) for index in refused) / len(refused),
        refused_alone_would_miss=sum(judged.would_miss) / max(1, len(judged.would_miss)),
        admitted_met=sum(met(one, TARGETS) for one in taken) / len(taken),
        fcfs_met=sum(met(one, TARGETS) for one in fcfs.outcomes) / count,
        goodput_over_fcfs=_goodput(judged) / _goodput(fcfs),
    )


def _run(trace: Sequence[TraceRequest], policy: str, seed: int) -> Simulation:
    run = Simulation(
        trace, MACHINE, POOL, LIMITS, SchedulingConfig.model_validate({"policy": policy, "admission": "none"}), seed
    )
    run.run()
    return run


def _goodput(run: Simulation) -> float:
    good: list[Outcome] = [one for one in run.outcomes if met(one, TARGETS)]
    return sum(one.tokens for one in good) / run.clock.now


def main() -> None:
    """Measure some seeds and write the result file."""
    parser = argparse.ArgumentParser(description="Admission at twice the engine's capacity")
    parser.add_argument("--quick", action="store_true", help="one short trace; writes nothing")
    quick = parser.parse_args().quick
    rate = OVERLOAD * capacity(1_000 if quick else 3_000)
    count, seeds, share = (1_000, [1], 0.02) if quick else (6_000, [1, 2, 3], 0.02)
    results = [measure(rate, count, seed, share) for seed in seeds]
    ratios = {
        key: median(getattr(result, key) for result in results)
        for key in Result.__dataclass_fields__
        if key not in ("seed", "requests")
    }
    for key, value in ratios.items():
        print(f"{key:32} {value:.3f}")
    if not quick:
        workload = {"overload": OVERLOAD, "requests_per_second": rate, "machine": asdict(MACHINE), "tiers": "3:5:2"}
        print(write_rows("overload", workload, [asdict(result) for result in results], ratios))
        print(fill("overload"))


if __name__ == "__main__":
    main()
