"""The pretended machine: how long a step takes, what it generates, and the clock that both go by.

`driver` builds the engine's core on it. The core runs as in the real engine; only time and tokens are made up here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from paceline_server.engine.batch import SequenceSlice, StepBatch
from paceline_server.engine.steptime import StepShape
from paceline_server.simulator.trace import TraceRequest

END = 0
"""The token that ends an answer."""

_TEXT = 1


class VirtualClock:
    """Seconds that pass only when something says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0.0, "time does not go back"
        self.now += seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step costs, in seconds: `fixed + by_token * tokens + by_pair * pairs`, as `StepTimeModel` measures it.

    Attributes:
        fixed: by itself.
        by_token: for a token.
        by_pair: for a token and one before it.
        jitter: standard deviation of a step's time relative to its mean.
    """

    fixed: float
    by_token: float
    by_pair: float
    jitter: float = 0.0

    def seconds(self, shape: StepShape, random: Random) -> float:
        """Duration of one step; never less than half of its mean."""
        mean = self.fixed + self.by_token * shape.tokens + self.by_pair * shape.pairs
        return mean * max(0.5, random.gauss(1.0, self.jitter)) if self.jitter else mean


class SimulatedRunner:
    """Implements `Runner`: lets the time of a step pass, and ends each answer where the trace says.

    A slice carries the index of its request in the trace as its seed.

    Args:
        trace: what was asked.
        seed: of the jitter.
    """

    def __init__(self, machine: Machine, clock: VirtualClock, trace: Sequence[TraceRequest], seed: int = 0) -> None:
        self._machine = machine
        self._clock = clock
        self._trace = trace
        self._random = Random(seed)

    def execute(self, batch: StepBatch) -> list[int | None]:
        """Run one step."""
        shape = StepShape.of((piece.start, len(piece.token_ids)) for piece in batch.slices)
        self._clock.advance(self._machine.seconds(shape, self._random))
        return [self._sample(piece) for piece in batch.slices]

    def _sample(self, piece: SequenceSlice) -> int | None:
        if piece.sampling is None:
            return None
        request = self._trace[piece.sampling.seed]
        generated = piece.start + len(piece.token_ids) - request.prompt_tokens + 1
        return END if generated == request.output_tokens else _TEXT
