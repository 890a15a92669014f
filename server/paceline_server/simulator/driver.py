"""Runs a trace through the engine's core on a pretended machine. `command` and the benchmarks call it.

It is the core of the real engine, with its scheduler, block manager, admission and measurements: a policy is tried
exactly as it would be served. Requests reach the core between two steps, as they do over the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from paceline_server.config import SchedulingConfig
from paceline_server.engine.admission import Refusal
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason, ModelInfo, TokenOutput
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.simulator.machine import END, Machine, SimulatedRunner, VirtualClock
from paceline_server.simulator.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache of the pretended machine."""

    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True


@dataclass(slots=True)
class Outcome:
    """What became of one request; times are seconds since its arrival.

    Attributes:
        predicted_ttft: what was foretold when it reached the core, or None where nothing was known.
        tokens: generated.
    """

    request: TraceRequest
    predicted_ttft: float | None = None
    refusal: Refusal | None = None
    ttft: float | None = None
    end: float | None = None
    tokens: int = 0
    finish: FinishReason | None = None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first."""
        if self.ttft is None or self.end is None or self.tokens < 2:
            return None
        return (self.end - self.ttft) / (self.tokens - 1)


class Simulation:
    """One run of a trace.

    Args:
        trace: in order of arrival.
        machine: what steps cost.
        seed: of the machine's jitter.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        machine: Machine,
        pool: Pool,
        limits: SchedulerLimits,
        scheduling: SchedulingConfig,
        seed: int = 0,
    ) -> None:
        self.clock = VirtualClock()
        self.outcomes = [Outcome(request) for request in trace]
        self._trace = trace
        self._next = 0
        self.core = EngineCore(
            SimulatedRunner(machine, self.clock, trace, seed),
            _info(trace, pool),
            limits,
            scheduling,
            prefix_caching=pool.prefix_caching,
            clock=self.clock,
        )

    @property
    def done(self) -> bool:
        """Whether everything has come and gone."""
        return self._next == len(self._trace) and not self.core.has_work

    def run(self, watch: Callable[[int], None] | None = None) -> list[Outcome]:
        """Run to the end; returns what became of each request, in the trace's order.

        Args:
            watch: told after every step how many requests of the trace have come.
        """
        while not self.done:
            self.advance()
            if watch is not None:
                watch(self._next)
        return self.outcomes

    def advance(self) -> None:
        """Take in what has arrived, and run one step; when idle, wait for the next arrival."""
        if not self.core.has_work and self._next < len(self._trace):
            self.clock.now = max(self.clock.now, self._trace[self._next].arrival)
        while self._next < len(self._trace) and self._trace[self._next].arrival <= self.clock.now:
            self.submit(self._next)
            self._next += 1
        for output in self.core.step():
            self._note(output)

    def submit(self, index: int) -> None:
        """Hand one request to the core."""
        outcome = self.outcomes[index]
        request = outcome.request
        outcome.refusal = self.core.submit(request.request(index), request.arrival)
        predicted = self.core.admission.last_forecast
        outcome.predicted_ttft = None if predicted is None else self.clock.now - request.arrival + predicted

    def force(self, index: int) -> None:
        """Hand one request to the core though it may have been refused; those that come after it are handed as ever."""
        outcome = self.outcomes[index]
        outcome.refusal = None
        self.core.submit(outcome.request.request(index), outcome.request.arrival, judge=False)
        self._next = max(self._next, index + 1)

    def fork(self) -> Simulation:
        """A copy that goes its own way from here on, with the same trace."""
        return deepcopy(self, {id(self._trace): self._trace})

    def _note(self, output: TokenOutput) -> None:
        outcome = self.outcomes[int(output.request_id)]
        elapsed = self.clock.now - outcome.request.arrival
        outcome.tokens += len(output.token_ids)
        if outcome.ttft is None and output.token_ids:
            outcome.ttft = elapsed
        if output.finish is not None:
            outcome.finish, outcome.end = output.finish, elapsed


def _info(trace: Sequence[TraceRequest], pool: Pool) -> ModelInfo:
    """The facts of a pretended model whose context holds every request of the trace.

    Of a pool that the whole trace cannot fill, so that nothing is ever evicted, there are only the blocks that it can:
    the core keeps books of each, which for 100 million take gigabytes.
    """
    lengths = [one.prompt_tokens + (one.max_tokens or one.output_tokens) for one in trace]
    filled = sum(-(-length // pool.block_size) + 1 for length in lengths)  # and a last block that is computed twice
    return ModelInfo(
        folder="",
        max_model_len=max(lengths),
        vocab_size=1 << 32,
        eos_token_ids=(END,),
        num_blocks=min(pool.num_blocks, filled),
        block_size=pool.block_size,
        dtype="simulated",
        device="simulated",
        attention_backend="simulated",
    )
