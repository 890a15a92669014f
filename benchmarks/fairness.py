"""One tenant floods: what the others notice, and what each of those who always have work waiting gets.

    python -m benchmarks.fairness [--quick]

Run on the simulator under `slo`, without admission. Writes benchmarks/results/fairness.json:

- `victim_ttft_p95`: four tenants ask for 60 % of the engine together; a fifth floods it with ten times its share. The
  95th percentile of the four's time to the first token over what it is without the fifth. `victim_ttft_p95_fcfs` is
  the same under fcfs.
- `jain`: five tenants with work waiting all the time, whose requests differ in size. Jain's index of the weighted
  tokens (prompt 1, output 2) that each was served, 1 where all got the same. `jain_fcfs` is the same under fcfs.
- `weighted_share_error`: three of them with weights 1, 2 and 4: largest relative error of a share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from random import Random
from statistics import median
from typing import Any

from benchmarks.overload import capacity
from benchmarks.pages import fill
from benchmarks.results import write_rows
from benchmarks.traces import LIMITS, MACHINE, POOL, poisson
from paceline_server.config import SchedulingConfig
from paceline_server.engine.fairness import INPUT_COST, OUTPUT_COST
from paceline_server.engine.interface import Tier
from paceline_server.simulator.driver import Outcome, Simulation
from paceline_server.simulator.report import quantile
from paceline_server.simulator.trace import TraceRequest

FLOOD = 10.0
VICTIMS = ("a", "b", "c", "d")
_SIZES = ((40, 200), (400, 20), (200, 80), (800, 40), (40, 20))  # prompt and output tokens, by tenant
_STANDARD = {Tier.STANDARD: 1.0}


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: (sum x)^2 / (n * sum x^2), between 1/n and 1."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def of_tenant(requests: Iterable[TraceRequest], tenant: str, **changes: Any) -> list[TraceRequest]:
    """The requests on a tenant's account."""
    return [request.model_copy(update={"tenant": tenant, **changes}) for request in requests]


def run(trace: Sequence[TraceRequest], policy: str, enough: Callable[[Simulation], bool]) -> list[Outcome]:
    """Run a trace until there is enough of it, or to its end."""
    scheduling = SchedulingConfig.model_validate({"policy": policy, "admission": "none"})
    simulation = Simulation(sorted(trace, key=lambda one: one.arrival), MACHINE, POOL, LIMITS, scheduling)
    while not (simulation.done or enough(simulation)):
        simulation.advance()
    return simulation.outcomes


def flooding(rate: float, seconds: float, seed: int) -> dict[str, float]:
    """The victims' 95th percentile with the flood over that without it, by policy."""
    share = rate / (len(VICTIMS) + 1)
    victims = [
        request
        for index, tenant in enumerate(VICTIMS)
        for request in of_tenant(poisson(0.75 * share, int(0.75 * share * seconds), seed + index, _STANDARD), tenant)
    ]
    flood = of_tenant(poisson(FLOOD * share, int(FLOOD * share * seconds), seed + 99, _STANDARD), "flood")
    alone = _victims_p95(victims, "slo")
    return {
        "victim_ttft_p95": _victims_p95(victims + flood, "slo") / alone,
        "victim_ttft_p95_fcfs": _victims_p95(victims + flood, "fcfs") / alone,
        "victim_ttft_p95_alone_seconds": alone,
    }


def backlogged(seconds: float, seed: int, weights: Mapping[str, float], policy: str) -> dict[str, float]:
    """Weighted tokens served to each tenant, over its weight, while all have work waiting."""
    random = Random(seed)
    trace = [
        TraceRequest(
            arrival=random.random() * seconds / 50,
            prompt_tokens=max(1, int(random.gauss(prompt, prompt / 5))),
            output_tokens=max(1, int(random.gauss(output, output / 5))),
            tenant=tenant,
            weight=weight,
        )
        for (tenant, weight), (prompt, output) in zip(weights.items(), _SIZES, strict=False)
        for _ in range(int(60 * seconds))
    ]
    outcomes = run(trace, policy, lambda simulation: simulation.clock.now >= seconds)
    return {tenant: _served(outcomes, tenant) / weight for tenant, weight in weights.items()}


def _victims_p95(trace: Sequence[TraceRequest], policy: str) -> float:
    """Of a run that goes on until each of their requests has its first token."""

    def all_started(simulation: Simulation) -> bool:
        return all(one.ttft is not None for one in simulation.outcomes if one.request.tenant in VICTIMS)

    outcomes = run(trace, policy, all_started)
    return quantile([one.ttft for one in outcomes if one.request.tenant in VICTIMS and one.ttft is not None], 0.95)


def _served(outcomes: Sequence[Outcome], tenant: str) -> float:
    started = [one for one in outcomes if one.request.tenant == tenant and one.ttft is not None]
    return sum(INPUT_COST * one.request.prompt_tokens + OUTPUT_COST * one.tokens for one in started)


def measure(rate: float, seconds: float, seed: int) -> dict[str, float]:
    """All figures of one seed."""
    even = dict.fromkeys("pqrst", 1.0)
    weighted = list(backlogged(seconds, seed, {"x": 1.0, "y": 2.0, "z": 4.0}, "slo").values())
    return {
        "seed": seed,
        **flooding(rate, seconds, seed),
        "jain": jain(list(backlogged(seconds, seed, even, "slo").values())),
        "jain_fcfs": jain(list(backlogged(seconds, seed, even, "fcfs").values())),
        "weighted_share_error": max(abs(value / (sum(weighted) / 3) - 1.0) for value in weighted),
    }


def main() -> None:
    """Measure some seeds and write the result file."""
    parser = argparse.ArgumentParser(description="Fairness between tenants")
    parser.add_argument("--quick", action="store_true", help="one short trace; writes nothing")
    quick = parser.parse_args().quick
    rate = capacity(1_000 if quick else 3_000)
    seconds, seeds = (20.0, [1]) if quick else (60.0, [1, 2, 3])
    results = [measure(rate, seconds, seed) for seed in seeds]
    ratios = {key: median(result[key] for result in results) for key in results[0] if key != "seed"}
    for key, value in ratios.items():
        print(f"{key:32} {value:.3f}")
    if not quick:
        workload = {"flood": FLOOD, "victims": len(VICTIMS), "victims_load": 0.6, "machine": asdict(MACHINE)}
        print(write_rows("fairness", workload, results, ratios))
        print(fill("fairness"))


if __name__ == "__main__":
    main()
