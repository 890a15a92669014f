"""Who may wait. The step loop asks it about every request before the scheduler gets to know of it.

A request that cannot be in time is refused at once, with a time after which it could be: a client that hears it now
can go elsewhere, and those that are already in line keep their chance. What "in time" means is configured: the
request's own timeout, or the tier's target for the first token as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from paceline_server.engine.batchers import StepScheduler
from paceline_server.engine.forecast import ArrivalRate, Forecast, Newcomer, Room
from paceline_server.engine.interface import FinishReason, GenerationRequest, Tier, TokenOutput
from paceline_server.engine.pacing import Pacer
from paceline_server.engine.queue import Backlog
from paceline_server.engine.scheduler import Scheduled
from paceline_server.engine.sequence import Sequence

Mode = Literal["none", "timeout", "target"]

_OUTLOOK_SECONDS = 0.25
_OWN_PROMPT_FACTOR = 2.0
_MAX_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken.

    Attributes:
        message: for the caller.
        retry_after: seconds after which it could be taken, or None where the same request will be refused again.
    """

    message: str
    retry_after: float | None = None


class Admission:
    """Decides by forecast, and learns from what then happened.

    Args:
        scheduler: whose line and sequences are looked at, never changed.
        pacer: how the scheduler sizes its prefills.
        forecast: predicts; learns here.
        ttft_targets: seconds by tier.
        mode: what a request must be able to meet.
    """

    def __init__(
        self, scheduler: StepScheduler, pacer: Pacer, forecast: Forecast, ttft_targets: Mapping[Tier, float], mode: Mode
    ) -> None:
        self._scheduler = scheduler
        self._pacer = pacer
        self._forecast = forecast
        self._targets = ttft_targets
        self._mode = mode
        self._offered = {tier: ArrivalRate() for tier in Tier}  # refused ones included: they will come again
        self._predicted: dict[str, float] = {}  # seconds from submission, of those that have not started
        self._submitted: dict[str, float] = {}
        self.last_forecast: float | None = None  # of the request that was judged last
        self._outlook: dict[str, float] = {}
        self._outlook_at: float | None = None

    def refusal(self, sequence: Sequence, now: float) -> Refusal | None:
        """Why a sequence that has just come must not enter the line, or None."""
        self._offered[sequence.request.tier].note(now)
        predicted = self.last_forecast = self.predict(sequence, now)
        if predicted is None:
            return None
        waited = now - sequence.arrival
        for limit, margin in self._limits(sequence):
            latest = waited + predicted * margin
            if latest > limit:
                return Refusal(
                    f"the first token may come as late as after {latest:.2f} s and is wanted within {limit:.2f} s",
                    min(latest - limit, _MAX_RETRY_SECONDS),
                )
        self._predicted[sequence.request_id], self._submitted[sequence.request_id] = predicted, now
        return None

    def predict(self, sequence: Sequence, now: float) -> float | None:
        """Seconds from now to the first token of a sequence that is not in the line yet; None where nobody knows."""
        ahead = self._scheduler.waiting.ahead_of(sequence, now)
        newcomer = Newcomer(
            tier=sequence.request.tier,
            tokens=sequence.num_tokens - self._scheduler.tables.cached_tokens(sequence),
            blocks=self._blocks_taken_by(sequence),
            ahead=ahead,
            overtaking=sum(self._offered[tier].per_second(now) for tier in ahead.overtaken_by),
        )
        return self._forecast.seconds(newcomer, self._scheduler.running, self._room())

    def learn(self, plan: Iterable[Scheduled], outputs: Iterable[TokenOutput], now: float) -> None:
        """Take what a step brought: requests that started correct the forecast, those that ended tell a length."""
        sequences = {item.sequence.request_id: item.sequence for item in plan}
        for output in outputs:
            sequence = sequences[output.request_id]
            if output.request_id in self._predicted:
                took = now - self._submitted.pop(output.request_id)
                self._forecast.observe(sequence.request.tier, self._predicted.pop(output.request_id), took)
            if output.finish is not None:
                self._forecast.lengths.observe(sequence.num_output, cut=output.finish is FinishReason.LENGTH)

    def forget(self, request_id: str) -> None:
        """A request is gone without having started."""
        self._predicted.pop(request_id, None)
        self._submitted.pop(request_id, None)

    def outlook(self, now: float) -> dict[str, float]:
        """Seconds to the first token of a short new request, by tier, at most a quarter of a second old."""
        if self._outlook_at is None or now - self._outlook_at >= _OUTLOOK_SECONDS:
            probes = {tier: Sequence(GenerationRequest("", (0,), 1, tier=tier), now, 1) for tier in Tier}
            found = {tier.value: self.predict(probe, now) for tier, probe in probes.items()}
            self._outlook = {tier: seconds for tier, seconds in found.items() if seconds is not None}
            self._outlook_at = now
        return self._outlook

    def _limits(self, sequence: Sequence) -> Iterator[tuple[float, float]]:
        """Seconds since its arrival within which a sequence must start, each with the margin of safety it needs.

        Its timeout is an all or nothing of its own: it is let in if it is more likely to be in time than not. A target
        is a promise to everybody in line.
        """
        timeout, tier = sequence.request.timeout, sequence.request.tier
        if self._mode != "none" and timeout is not None:
            yield timeout, 1.0
        if self._mode == "target":
            # A prompt that misses the target even alone is not overload: it is held to a multiple of its own time.
            alone = self._forecast.seconds(Newcomer(tier, sequence.num_tokens, 0, Backlog()), (), self._room()) or 0.0
            yield max(self._targets[tier], _OWN_PROMPT_FACTOR * alone), self._forecast.margin(tier)

    def _blocks_taken_by(self, sequence: Sequence) -> int:
        blocks, prefix = self._scheduler.blocks, self._scheduler.tables.cached_blocks(sequence)
        return blocks.blocks_for(sequence.num_tokens) - blocks.num_held(prefix)

    def _room(self) -> Room:
        scheduler = self._scheduler
        running = len(scheduler.running)
        decoding = [sequence for sequence in scheduler.running if sequence.remaining == 1]
        budget = max(1, scheduler.limits.max_tokens_in_batch - len(decoding))
        return Room(
            slots=scheduler.limits.max_batch_size - running,
            blocks=scheduler.blocks.num_free - running,
            block_size=scheduler.blocks.block_size,
            chunk=self._pacer.prefill_tokens(decoding, 0, budget),
            left_by=lambda one: scheduler.blocks.num_freed_by(one.block_table) + 1,
        )
