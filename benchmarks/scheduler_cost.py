"""What scheduling costs: a step with 1,000 and with 100,000 requests waiting, and the memory of one that waits.

    python -m benchmarks.scheduler_cost [--quick]

256 sequences run; in each step about four of them end and as many enter, under `slo` with 50 tenants and three tiers.
Times are of the processor, so that other programs on the machine do not count.
Writes benchmarks/results/scheduler_cost.json:

- `waiting_100k_over_1k`: median time of `schedule` with 100,000 waiting over that with 1,000.
- `push_100k_over_1k`: the same of adding a request to the line.
- `bytes_per_waiting`: memory that the scheduler adds to a waiting request, whose own prompt is not counted.
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from time import process_time as cpu_seconds

from benchmarks.results import write_rows
from paceline_server.config import SchedulingConfig
from paceline_server.engine.blocks import BlockManager
from paceline_server.engine.interface import GenerationRequest, Tier
from paceline_server.engine.policies import waiting_line
from paceline_server.engine.scheduler import Scheduler, SchedulerLimits
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.tables import BlockTables

RUNNING = 256
PROMPT, OUTPUT = 64, 64
TENANTS = 50
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
        self.scheduler = Scheduler(SchedulerLimits(RUNNING, 1024), tables, waiting_line(scheduling))
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


def measure(policy: str, waiting: int, steps: int) -> Cost:
    """Medians over steps, after as many to settle."""
    load = Load(policy, waiting)
    gc.collect()
    gc.freeze()  # a collection that walks 100,000 requests is the interpreter's cost, and falls outside of a step
    load.push_seconds.clear()
    times = []
    for _ in range(steps):
        times.append(load.step())
        load.fill(waiting)
    gc.unfreeze()
    return Cost(
        policy=policy,
        waiting=waiting,
        schedule_us=1e6 * median(schedule for schedule, _ in times),
        schedule_max_us=1e6 * max(schedule for schedule, _ in times),
        update_us=1e6 * median(update for _, update in times),
        push_us=1e6 * median(load.push_seconds),
    )


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


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description="The cost of scheduling")
    parser.add_argument("--quick", action="store_true", help="few steps; writes nothing")
    quick = parser.parse_args().quick
    steps = 100 if quick else 400
    costs = [
        measure(policy, waiting, steps) for policy in ("slo", "fcfs", "priority", "sjf") for waiting in (1_000, 100_000)
    ]
    for cost in costs:
        print(cost)
    few, many = costs[:2]
    ratios = {
        "waiting_100k_over_1k": many.schedule_us / few.schedule_us,
        "push_100k_over_1k": many.push_us / few.push_us,
        "bytes_per_waiting": bytes_per_waiting("slo", 20_000),
    }
    print(ratios)
    if not quick:
        workload = {"running": RUNNING, "prompt_tokens": PROMPT, "tenants": TENANTS, "steps": steps}
        print(write_rows("scheduler_cost", workload, [asdict(cost) for cost in costs], ratios))


if __name__ == "__main__":
    main()
