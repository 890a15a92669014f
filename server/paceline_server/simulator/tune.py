"""Proposes batch size, token budget and delay window for a recorded trace. `tune_command` prints what comes out.

Every pair of a grid is predicted (`queueing`). The simulator checks those that no other one beats in time to the first
token, capacity and length of step, and one is proposed: the soonest first token whose steps are short enough and that
keeps a reserve of capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean

from paceline_server.config import SchedulingConfig
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.simulator.driver import Pool, Simulation
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.queueing import Prediction, Workload, predict
from paceline_server.simulator.trace import TraceRequest

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BUDGETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_RESERVE = 1.25  # of capacity over what the trace asks for: bursts, and growth until somebody tunes again
_WORTH = 1.05  # of a figure: what is no better than this is not better
_CHECKED_TOKENS = 10_000  # output tokens of a check: a lightly loaded machine takes a step for nearly each
LEAST_CHECKED = 100
"""Requests below which a trace says little."""

_MOST_CHECKED = 500  # requests of a check
_FLOOD = 4  # times the batch: requests that keep it full until its sequences have come and gone a few times


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings, and what is expected of them."""

    limits: SchedulerLimits
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Checked:
    """What the simulator makes of a candidate.

    Attributes:
        ttft: mean seconds to the first token.
        capacity: output tokens/s at most; None where the trace has too few requests to fill the batch more than once.
    """

    candidate: Candidate
    ttft: float
    capacity: float | None


def candidates(work: Workload, machine: Machine, pool: Pool) -> list[Candidate]:
    """All of the grid."""
    grid = (SchedulerLimits(batch, budget) for batch in _BATCHES for budget in _BUDGETS if budget >= 2 * batch)
    return [Candidate(limits, predict(work, machine, limits, pool)) for limits in grid]


def frontier(found: Iterable[Candidate]) -> list[Candidate]:
    """Those that carry the load and that no other one beats in all figures, shortest steps first.

    A larger budget brings first tokens sooner and more capacity, and makes those who generate wait for longer steps.
    """
    best: list[Candidate] = []
    stable = [one for one in found if isfinite(one.prediction.ttft)]
    for one in sorted(stable, key=lambda one: (-one.prediction.capacity, one.prediction.longest_step)):
        if not any(_as_good(other.prediction, one.prediction) for other in best):
            best.append(one)
    return sorted(best, key=lambda one: one.prediction.longest_step)


def propose(best: Sequence[Candidate], found: Sequence[Candidate], work: Workload, longest_step: float) -> Candidate:
    """The soonest first token with steps that are short enough and a reserve of capacity.

    Where none has that reserve: the most capacity with such steps, and where no steps are that short: the shortest.
    """
    short = [one for one in found if one.prediction.longest_step <= longest_step]
    if not short:
        return min(found, key=lambda one: one.prediction.longest_step)
    wanted = _RESERVE * work.rate * work.output.mean
    enough = [one for one in best if one in short and one.prediction.capacity >= wanted]
    if not enough:
        return max(short, key=lambda one: one.prediction.capacity)
    return min(enough, key=lambda one: one.prediction.ttft)


def _as_good(one: Prediction, other: Prediction) -> bool:
    """Whether nothing of the other one is better, by more than a trifle."""
    return (
        one.ttft <= _WORTH * other.ttft
        and one.longest_step <= _WORTH * other.longest_step
        and one.capacity * _WORTH >= other.capacity
    )


def delay_seconds(work: Workload, machine: Machine) -> float:
    """Window that an idle engine should wait for company: a step's fixed cost, where that brings at least one more.

    Company saves that cost once for each that comes; where less than one comes in that time, waiting costs more.
    """
    return machine.fixed if work.rate * machine.fixed >= 1.0 else 0.0


def check(candidate: Candidate, trace: Sequence[TraceRequest], machine: Machine, pool: Pool) -> Checked:
    """Run a typical stretch of the trace as it was, and some batches of it with everything there at the beginning."""
    typical = typical_stretch(trace)
    as_it_was = _simulate(candidate, typical, machine, pool)
    as_it_was.run()
    batch = candidate.limits.max_batch_size
    crowd = trace[: min(_MOST_CHECKED, max(len(typical), _FLOOD * batch))]
    return Checked(
        candidate,
        ttft=mean(one.ttft for one in as_it_was.outcomes if one.ttft is not None),
        capacity=_capacity(candidate, crowd, machine, pool) if len(crowd) > batch else None,
    )


def _capacity(candidate: Candidate, crowd: Sequence[TraceRequest], machine: Machine, pool: Pool) -> float:
    flood = _simulate(candidate, [one.model_copy(update={"arrival": 0.0}) for one in crowd], machine, pool)
    while len(flood.core.scheduler.waiting) or flood.clock.now == 0.0:
        flood.advance()  # until the last one has entered: the emptying at the end is not capacity
    return sum(one.tokens for one in flood.outcomes) / flood.clock.now


def typical_stretch(trace: Sequence[TraceRequest]) -> Sequence[TraceRequest]:
    """Requests in a row that come at the rate of the whole trace as nearly as any.

    They are as many as make up some thousand output tokens, which bounds the steps, and so the time, of a simulation.
    """
    tokens = mean(one.output_tokens for one in trace)
    count = min(len(trace), _MOST_CHECKED, max(LEAST_CHECKED, round(_CHECKED_TOKENS / tokens)))
    wanted = (trace[-1].arrival - trace[0].arrival) * (count - 1) / max(1, len(trace) - 1)
    starts = range(len(trace) - count + 1)
    first = min(starts, key=lambda start: abs(trace[start + count - 1].arrival - trace[start].arrival - wanted))
    return trace[first : first + count]


def _simulate(candidate: Candidate, trace: Sequence[TraceRequest], machine: Machine, pool: Pool) -> Simulation:
    patient = [one.model_copy(update={"timeout": None}) for one in trace]
    scheduling = SchedulingConfig(policy="fcfs", admission="none")
    return Simulation(patient, machine, pool, candidate.limits, scheduling)
