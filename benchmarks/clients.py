"""Clients in a closed loop around the engine's core, in this process: what batchers and caches are compared with.

Without HTTP in between, a difference is the engine's own. `batching` and `claims` run their traces here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, pstdev
from time import perf_counter, sleep

from benchmarks.load import percentile
from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import GenerationRequest


@dataclass(frozen=True, slots=True)
class Job:
    """One request: what it says does not matter, how long it is does."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(slots=True)
class Served:
    """When one request was sent, and when its tokens came; seconds on one clock."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """What one run came to.

    Attributes:
        useful_tokens: prompt and output tokens of the requests.
        computed_tokens: of all steps, padding and held members included.
        ttft_p50, ttft_p99, itl_p50, itl_p99, e2e_p50: seconds.
        ttft_spread: standard deviation over mean.
        sequences_per_step: mean, of those whose tokens count.
        max_running: most sequences that held memory together.
    """

    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    useful_tokens: int
    computed_tokens: int
    padded_tokens: int
    held_tokens: int
    steps: int
    sequences_per_step: float
    max_running: int
    ttft_p50: float
    ttft_p99: float
    ttft_spread: float
    itl_p50: float
    itl_p99: float
    e2e_p50: float

    @property
    def wasted(self) -> float:
        """Share of the computed tokens that nobody asked for."""
        return 1.0 - self.useful_tokens / self.computed_tokens


def mixed_jobs(count: int, vocabulary: int, seed: int = 0, prompt_median: int = 150) -> list[Job]:
    """Prompts of 33 to 512 tokens, outputs of 16 to 256 (median 45): log-normal, clamped; no two share a prefix."""
    random, jobs = Random(seed), []
    for _ in range(count):
        length = _clamp(prompt_median * random.lognormvariate(0.0, 0.7), 33, 512)
        output = _clamp(45 * random.lognormvariate(0.0, 0.8), 16, 256)
        jobs.append(Job(tuple(random.randrange(vocabulary) for _ in range(length)), output))
    return jobs


def run_clients(
    core: EngineCore, jobs: Sequence[Job], clients: int, watched: Callable[[Job], bool] = lambda _: True
) -> ClosedLoop:
    """Run all jobs; each client sends its next one when the last one has ended.

    Args:
        core: idle; its counters may have run before.
        watched: whose latencies are summarised.
    """
    served: list[Served] = []
    line = enumerate(jobs)
    before, running = _Counters.of(core), 0
    begin = perf_counter()
    for _ in range(clients):
        _send(core, line, served)
    while (due := core.due_in()) is not None:
        sleep(due)
        outputs = core.step()
        running = max(running, len(core.scheduler.running))
        now = perf_counter()
        for output in outputs:
            record = served[int(output.request_id)]
            record.tokens += [now] * len(output.token_ids)
            if output.finish is not None:
                record.ended = now
                _send(core, line, served)
    seconds = perf_counter() - begin
    latencies = _latencies([record for record, job in zip(served, jobs, strict=True) if watched(job)])
    generated = sum(len(one.tokens) for one in served)
    counted = _Counters.of(core)
    steps = counted.steps - before.steps
    return ClosedLoop(
        seconds=seconds,
        output_tokens=generated,
        output_tokens_per_second=generated / seconds,
        useful_tokens=generated + sum(len(job.prompt) - 1 for job in jobs),  # an answer's last token is not computed on
        computed_tokens=counted.computed - before.computed,
        padded_tokens=counted.padded - before.padded,
        held_tokens=counted.held - before.held,
        steps=steps,
        sequences_per_step=generated / steps,
        max_running=running,
        **latencies,
    )


@dataclass(frozen=True, slots=True)
class _Counters:
    """A core's totals."""

    computed: int
    steps: int
    padded: int
    held: int

    @classmethod
    def of(cls, core: EngineCore) -> _Counters:
        stats, totals = core.stats(), core.scheduler.totals
        return cls(stats.computed_tokens, stats.steps, totals.padded_tokens, totals.held_tokens)


def _send(core: EngineCore, line: Iterator[tuple[int, Job]], served: list[Served]) -> None:
    number, job = next(line, (None, None))
    if number is None or job is None:
        return
    served.append(Served(perf_counter()))
    request = GenerationRequest(
        str(number), job.prompt, job.output_tokens, SamplingParams(temperature=0.0), ignore_eos=True
    )
    refusal = core.submit(request)
    assert refusal is None, refusal


def _latencies(served: Sequence[Served]) -> dict[str, float]:
    ttft = [one.tokens[0] - one.sent for one in served]
    gaps = [b - a for one in served for a, b in zip(one.tokens, one.tokens[1:], strict=False)]
    return {
        "ttft_p50": percentile(ttft, 0.5),
        "ttft_p99": percentile(ttft, 0.99),
        "ttft_spread": pstdev(ttft) / fmean(ttft),
        "itl_p50": percentile(gaps, 0.5),
        "itl_p99": percentile(gaps, 0.99),
        "e2e_p50": percentile([one.ended - one.sent for one in served], 0.5),
    }


def _clamp(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))
