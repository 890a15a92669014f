"""What queueing theory says of a trace: expected waiting, step time and capacity. `tune` tries settings with it.

In steady state a step computes what has come since the last one. With `rate` requests a second, each of p prompt and o
output tokens and of A seconds of work beside the fixed cost of steps, a mean step takes

    t = fixed + rate * A * t,    so    t = fixed / (1 - rate * A),

and o * rate * t sequences run (Little, "A Proof for the Queuing Formula L = λW", 1961). A batch of B sequences is full
at rate = B / (o * fixed + A * B), a budget of T tokens at rate = T / ((p + o) * fixed + A * T): the smaller is the
capacity.

A prompt waits for those before it as in a queue with one server (M/G/1; Pollaczek 1930, Khinchine 1932), where S is the
time that steps of the whole budget take for it:

    W = rate * E[S^2] / (2 * (1 - rate * E[S])).

It waits for a slot as in a queue with B servers (Sakasegawa, "An approximation formula L_q ≃ αρ^β/(1-ρ)", 1977, which
for one server is the formula above), and for the end of the step under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.errors import InvalidConfiguration
from paceline_server.simulator.driver import Pool
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and mean square."""

    mean: float
    square: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Moments:
        """Of at least one value."""
        found = list(values)
        return cls(sum(found) / len(found), sum(value * value for value in found) / len(found))

    @property
    def spread(self) -> float:
        """Squared coefficient of variation."""
        return self.square / self.mean**2 - 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What a trace asks for.

    Attributes:
        rate: requests per second.
        prompt: tokens that have to be computed, those found in a prefix cache that forgets nothing taken off.
        output: tokens.
        context: tokens that an output token attends to, in the mean.
    """

    rate: float
    prompt: Moments
    output: Moments
    context: float

    @classmethod
    def of(cls, trace: Sequence[TraceRequest]) -> Workload:
        """Of a trace in order of arrival.

        Raises:
            InvalidConfiguration: everything comes at once, so there is no rate.
        """
        seconds = trace[-1].arrival - trace[0].arrival
        if seconds <= 0.0:
            raise InvalidConfiguration("the trace's requests all come at one time: there is no rate to tune for")
        outputs = [min(one.output_tokens, one.max_tokens or one.output_tokens) for one in trace]
        attended = [out * (one.prompt_tokens + out / 2) for one, out in zip(trace, outputs, strict=True)]
        return cls(
            rate=(len(trace) - 1) / seconds,
            prompt=Moments.of(_computed(trace)),
            output=Moments.of(outputs),
            context=sum(attended) / sum(outputs),
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected figures under some settings; times in seconds, infinite where the queue would grow without end.

    Attributes:
        ttft: mean time to the first token.
        tpot: of a step, so between two tokens of an answer.
        running: sequences that run, in the mean.
        capacity: output tokens per second that can be sustained.
        longest_step: of a full budget: the longest that an answer stalls for others' prompts.
    """

    ttft: float
    tpot: float
    running: float
    capacity: float
    longest_step: float


def predict(work: Workload, machine: Machine, limits: SchedulerLimits, pool: Pool) -> Prediction:
    """What to expect of a workload on a machine."""
    marginal = _marginal(work, machine)
    slots = min(float(limits.max_batch_size), _slots_of_pool(work, pool))
    tokens, budget = work.prompt.mean + work.output.mean, limits.max_tokens_in_batch
    by_slots = slots / (work.output.mean * machine.fixed + marginal * slots)
    by_budget = budget / (tokens * machine.fixed + marginal * budget)
    capacity = min(by_slots, by_budget) * work.output.mean
    longest = _step(work, machine, slots, max(0.0, budget - slots))
    if work.rate >= min(by_slots, by_budget):
        return Prediction(inf, inf, slots, capacity, longest)
    step = machine.fixed / (1.0 - work.rate * marginal)
    running = work.rate * work.output.mean * step
    chunk = max(1.0, budget - running)
    full = _step(work, machine, running, chunk)
    service = Moments(work.prompt.mean * full / chunk, work.prompt.square * (full / chunk) ** 2)
    waiting = pollaczek_khinchine(work.rate, service) + _slot_waiting(work, step, running, slots)
    under_way = (1.0 - exp(-running)) * step / 2.0
    ttft = under_way + waiting + _own(work, machine, running, chunk)
    return Prediction(ttft, step, running, capacity, longest)


def pollaczek_khinchine(rate: float, service: Moments) -> float:
    """Mean waiting in an M/G/1 queue, in seconds; infinite at full load."""
    load = rate * service.mean
    return inf if load >= 1.0 else rate * service.square / (2.0 * (1.0 - load))


def _marginal(work: Workload, machine: Machine) -> float:
    """Seconds of work of a request beside the fixed cost of steps."""
    pairs = work.prompt.square / 2.0 + work.output.mean * work.context
    return machine.by_token * (work.prompt.mean + work.output.mean) + machine.by_pair * pairs


def _step(work: Workload, machine: Machine, running: float, prompt: float) -> float:
    """Seconds of a step that computes so many tokens of prompts beside those that run."""
    half = work.prompt.square / work.prompt.mean / 2.0
    pairs = running * work.context + prompt * half
    return machine.fixed + machine.by_token * (running + prompt) + machine.by_pair * pairs


def _own(work: Workload, machine: Machine, running: float, chunk: float) -> float:
    """Seconds of the steps that compute a prompt when nothing is before it."""
    whole = work.prompt.mean / chunk
    if whole <= 1.0:
        return _step(work, machine, running, work.prompt.mean)
    return whole * _step(work, machine, running, chunk)


def _slot_waiting(work: Workload, step: float, running: float, slots: float) -> float:
    """Mean waiting for one of so many slots, each held for the steps of an answer."""
    load = running / slots
    if load >= 1.0:
        return inf
    queue: float = load ** (sqrt(2.0 * (slots + 1.0)) - 1.0) / (slots * (1.0 - load))
    return queue * work.output.mean * step * (1.0 + work.output.spread) / 2.0


def _slots_of_pool(work: Workload, pool: Pool) -> float:
    """Sequences that the KV cache holds, in the mean."""
    return max(1.0, pool.num_blocks * pool.block_size / (work.context + work.output.mean / 2.0))


def _computed(trace: Sequence[TraceRequest]) -> list[int]:
    """Prompt tokens of each request that no earlier one has computed; at least the last."""
    seen: set[str] = set()
    tokens: list[int] = []
    for one in trace:
        known = next((index for index, name in enumerate(one.blocks) if name not in seen), len(one.blocks))
        cached = known * one.block_tokens + (one.prefix_tokens if one.prefix and one.prefix in seen else 0)
        tokens.append(max(1, one.prompt_tokens - cached))
        seen.update(one.blocks, [one.prefix] if one.prefix else [])
    return tokens
