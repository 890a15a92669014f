"""What scheduling costs: a step with 1,000 and with 100,000 requests waiting, and the memory of one that waits.

    python -m benchmarks.scheduler_cost [--quick]

256 sequences run; in each step about four of them end and as many enter, under `slo` with 50 tenants and three tiers.
Times are of the processor, so that other programs on the machine do not count, but for the real model's steps, where
both times are of the clock. Needs `make model`. Writes benchmarks/results/scheduler_cost.json:

- `waiting_100k_over_1k`: time of `schedule` with 100,000 waiting over that with 1,000: median of the rounds, in each of
  which both are measured, a step of one by a step of the other.
- `share_of_step`: of a step of the real model with 16 running, what `schedule` takes.
- `push_100k_over_1k`: the same of adding a request to the line.
- `bytes_per_waiting`: memory that the scheduler adds to a waiting request, whose own prompt is not counted.
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import median
from time import process_time as cpu_seconds

from benchmarks.pages import fill
from benchmarks.real_engine import load_core
from benchmarks.results import write_rows
from paceline_server.config import SchedulingConfig
from paceline_server.engine.blocks import BlockManager
from paceline_server.engine.interface import GenerationRequest, Tier
from paceline_server.engine.policies import waiting_line
from paceline_server.engine.scheduler import Scheduler, SchedulerLimits
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.tables import BlockTables
from paceline_server.simulator.trace import TraceRequest

RUNNING = 256
SHORT, LONG = 1_000, 100_000
PROMPT, OUTPUT = 64, 64
TENANTS = 50
POLICIES = ("slo", "fcfs", "priority", "sjf")
_SECONDS_PER_STEP = 0.02


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians of one run, and the longest schedule, in microseconds."""

    policy: str
    waiting: int
    schedule_us: float
    schedule_max_us: float
    update_us: float
    push_us: float


class Load:
    """A scheduler that is kept at a number of running and waiting sequences.

    Args:
        waiting: how many.
    """

    def __init__(self, policy: str, waiting: int, seed: int = 0) -> None:
        self._random = Random(seed)
        self._count = 0
        self._waiting = waiting
        self.now = 0.0
        self.push_seconds: list[float] = []
        scheduling = SchedulingConfig.model_validate({"policy": policy})
        tables = BlockTables(BlockManager(RUNNING * 16, 16, prefix_caching=False))
        line = waiting_line(scheduling, tables.cached_tokens)
        self.scheduler = Scheduler(SchedulerLimits(RUNNING, 1024), tables, line)
        while len(self.scheduler.waiting) < waiting:  # the line grows while steps go on, as it does under overload
            self.fill(len(self.scheduler.waiting) + 40)
            self.step()

    def fill(self, target: int) -> None:
        """Add requests until so many wait."""
        while len(self.scheduler.waiting) < target:
            request = self.request()
            sequence = Sequence(request, self.now, request.max_tokens)
            begin = cpu_seconds()
            self.scheduler.add(sequence)
            self.push_seconds.append(cpu_seconds() - begin)

    def step(self) -> tuple[float, float]:
        """One step; returns the seconds that schedule and update took."""
        self.now += _SECONDS_PER_STEP
        begin = cpu_seconds()
        plan = self.scheduler.schedule(self.now)
        scheduled = cpu_seconds()
        sampled = [1 if item.count == item.sequence.remaining else None for item in plan]
        prepared = cpu_seconds()
        self.scheduler.update(plan, sampled)
        updated = cpu_seconds()
        return scheduled - begin, updated - prepared

    def request(self) -> GenerationRequest:
        """The next one."""
        self._count += 1
        random = self._random
        return GenerationRequest(
            request_id=str(self._count),
            prompt_token_ids=(7,) * PROMPT,
            max_tokens=random.randrange(OUTPUT // 2, 2 * OUTPUT),
            tier=random.choice(tuple(Tier)),
            tenant=str(random.randrange(TENANTS)),
            priority=random.randrange(3),
        )


def measure(policy: str, waitings: tuple[int, ...], steps: int) -> list[Cost]:
    """Medians over steps by number of waiting requests, one step of each in turn, so that all see the same machine."""
    loads = [Load(policy, waiting) for waiting in waitings]
    gc.collect()
    gc.freeze()  # a collection that walks 100,000 requests is the interpreter's cost, and falls outside of a step
    times: list[list[tuple[float, float]]] = [[] for _ in loads]
    for load in loads:
        load.push_seconds.clear()
    for _ in range(steps):
        for load, own, waiting in zip(loads, times, waitings, strict=True):
            own.append(load.step())
            load.fill(waiting)
    gc.unfreeze()
    return [
        Cost(
            policy=policy,
            waiting=waiting,
            schedule_us=1e6 * median(schedule for schedule, _ in own),
            schedule_max_us=1e6 * max(schedule for schedule, _ in own),
            update_us=1e6 * median(update for _, update in own),
            push_us=1e6 * median(load.push_seconds),
        )
        for load, own, waiting in zip(loads, times, waitings, strict=True)
    ]


def share_of_step(steps: int) -> float:
    """Share of a real step, with 16 that generate and 64 that wait, that deciding about it takes."""
    core = load_core(SchedulerLimits(max_batch_size=16, max_tokens_in_batch=256))
    trace = [TraceRequest(arrival=0.0, prompt_tokens=PROMPT, output_tokens=4 * steps)] * 80
    for index, request in enumerate(trace):
        core.submit(replace(request.request(index), ignore_eos=True))
    while any(one.remaining > 1 for one in core.scheduler.running) or len(core.scheduler.running) < 16:
        core.step()
    before = core.stats().stage_seconds
    for _ in range(steps):
        core.step()
    spent = {stage: seconds - before[stage] for stage, seconds in core.stats().stage_seconds.items()}
    return spent["schedule"] / sum(spent.values())


def bytes_per_waiting(policy: str, count: int) -> float:
    """Memory of a waiting request beyond the request itself."""
    load = Load(policy, 0)
    requests = [load.request() for _ in range(count)]
    gc.collect()
    tracemalloc.start()
    for request in requests:
        load.scheduler.add(Sequence(request, 0.0, request.max_tokens))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken / count


def _growth(costs: list[Cost], what: str, long: int) -> float:
    """Median over the rounds of a figure of `slo` with so many waiting over that with 1,000."""
    few, many = (
        [getattr(cost, what) for cost in costs if cost.policy == "slo" and cost.waiting == waiting]
        for waiting in (SHORT, long)
    )
    return float(median(large / small for small, large in zip(few, many, strict=True)))


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description="The cost of scheduling")
    parser.add_argument("--quick", action="store_true", help="few steps, and a line of 10,000; writes nothing")
    quick = parser.parse_args().quick
    steps, rounds, policies, long = (50, 1, POLICIES[:1], 10_000) if quick else (400, 3, POLICIES, LONG)
    costs = [cost for _ in range(rounds) for policy in policies for cost in measure(policy, (SHORT, long), steps)]
    for cost in costs:
        print(cost)
    ratios = {
        "waiting_100k_over_1k": _growth(costs, "schedule_us", long),
        "share_of_step": share_of_step(20 if quick else 200),
        "push_100k_over_1k": _growth(costs, "push_us", long),
        "bytes_per_waiting": bytes_per_waiting("slo", 20_000),
    }
    print(ratios)
    if not quick:
        workload = {"running": RUNNING, "prompt_tokens": PROMPT, "tenants": TENANTS, "steps": steps}
        print(write_rows("scheduler_cost", workload, [asdict(cost) for cost in costs], ratios))
        print(fill("scheduler_cost"))


if __name__ == "__main__":
    main()
