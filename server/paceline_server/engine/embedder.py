"""The step loop of a model that embeds: batches of whole texts, computed in one go.

`loop` drives it as it drives `core`. A request's texts are batched one by one, with those of others, tenants in turn
(`fair_line`); its answer goes out when all of them are there. While a batch is computed the next one gathers by itself;
only an idle engine may wait for company (`window`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from paceline_server.engine.admission import Refusal
from paceline_server.engine.batch import Encoder
from paceline_server.engine.dynamic import pop_batch
from paceline_server.engine.fair_line import FairLine
from paceline_server.engine.heap import LazyHeap
from paceline_server.engine.interface import EmbeddingOutput, EmbeddingRequest, ModelInfo
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.status import EngineStats
from paceline_server.engine.window import DelayWindow


@dataclass(slots=True, eq=False)
class _Open:
    """A request under way."""

    request: EmbeddingRequest
    arrival: float
    vectors: list[bytes | None] = field(init=False)
    missing: int = field(init=False)
    started: float | None = None

    def __post_init__(self) -> None:
        self.vectors = [None] * len(self.request.inputs)
        self.missing = len(self.request.inputs)

    @property
    def queue_seconds(self) -> float:
        return 0.0 if self.started is None else self.started - self.arrival


@dataclass(frozen=True, slots=True)
class _Text:
    """One text of a request."""

    owner: _Open
    index: int

    @property
    def name(self) -> str:
        return _name(self.owner.request.request_id, self.index)

    @property
    def share(self) -> tuple[str, float]:
        return self.owner.request.tenant, self.owner.request.weight

    @property
    def token_ids(self) -> Sequence[int]:
        return self.owner.request.inputs[self.index]


class EmbeddingCore:
    """A line of texts and an encoder, stepped together.

    Args:
        info: what is loaded.
        limits: texts and tokens of a batch.
        window: how long an idle engine waits for company.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        encoder: Encoder,
        info: ModelInfo,
        limits: SchedulerLimits,
        window: DelayWindow,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.info = info
        self._encoder = encoder
        self._limits = limits
        self._window = window
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._expiring: LazyHeap[float, _Open] = LazyHeap()
        self._line: FairLine[_Text] = FairLine(
            name=lambda text: text.name,
            size=lambda text: len(text.token_ids),
            arrival=lambda text: text.owner.arrival,
            share=lambda text: text.share,
        )
        self._steps = 0
        self._computed_tokens = 0
        self._expirations = 0
        self._last_batch: list[_Text] = []
        self._execute_seconds = 0.0

    def submit(self, request: EmbeddingRequest) -> Refusal | None:
        """Queue a request; returns why it can never be served, or None."""
        reason = self._why_never(request)
        if reason is not None:
            return Refusal(reason)
        now = self._clock()
        owner = self._open[request.request_id] = _Open(request, now)
        if request.timeout is not None:
            self._expiring.push(request.request_id, now + request.timeout, owner)
        for index in range(len(request.inputs)):
            self._window.note(now)
            self._line.push(_Text(owner, index))
        return None

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown ones (already finished) are no error."""
        self._expiring.remove(request_id)
        owner = self._open.pop(request_id, None)
        for index in range(len(owner.request.inputs) if owner is not None else 0):
            self._line.remove(_name(request_id, index))

    def due_in(self) -> float | None:
        """Seconds until `step` computes something; None where nothing waits."""
        return self._due_in(self._clock())

    def step(self) -> list[EmbeddingOutput]:
        """Embed one batch, if one is due; returns the requests that this completes, and those out of time."""
        begin = self._clock()
        outputs = self._expire(begin)
        due = self._due_in(begin)
        if due is None or due > 0.0:
            return outputs
        batch = self._last_batch = pop_batch(self._line, self._fits, begin)
        for text in batch:
            text.owner.started = begin if text.owner.started is None else text.owner.started
        vectors = self._encoder.encode([text.token_ids for text in batch])
        self._execute_seconds += self._clock() - begin
        self._steps += 1
        self._computed_tokens += sum(len(text.token_ids) for text in batch)
        for text, vector in zip(batch, vectors, strict=True):
            outputs += self._take(text, vector)
        return outputs

    def stats(self) -> EngineStats:
        """Gauges of this moment and totals since the start; requests count as running once a text of theirs was."""
        running = sum(one.started is not None for one in self._open.values())
        oldest = self._line.oldest_arrival
        return EngineStats(
            waiting=len(self._open) - running,
            running=running,
            waiting_tokens=self._line.num_tokens,
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            expirations=self._expirations,
            batch_sequences=len(self._last_batch),
            batch_tokens=sum(len(text.token_ids) for text in self._last_batch),
            oldest_waiting_seconds=0.0 if oldest is None else self._clock() - oldest,
            stage_seconds={"execute": self._execute_seconds},
        )

    def _why_never(self, request: EmbeddingRequest) -> str | None:
        lengths = [len(text) for text in request.inputs]
        if min(lengths, default=0) == 0:
            return "a request needs at least one text, and each text at least one token"
        if request.weight <= 0:
            return f"a tenant's weight is above 0, not {request.weight}"
        longest, budget = max(lengths), self._limits.max_tokens_in_batch
        if longest > self.info.max_model_len:
            return f"a text has {longest} tokens, and the model reads {self.info.max_model_len}"
        if longest > budget:
            return f"a text has {longest} tokens, and a batch here holds {budget} (batching.max_tokens_in_batch)"
        return None

    def _fits(self, batch: Sequence[_Text]) -> bool:
        tokens = sum(len(text.token_ids) for text in batch)
        return len(batch) <= self._limits.max_batch_size and tokens <= self._limits.max_tokens_in_batch

    def _due_in(self, now: float) -> float | None:
        oldest = self._line.oldest_arrival
        if oldest is None:
            return None
        limits = self._limits
        full = len(self._line) >= limits.max_batch_size or self._line.num_tokens >= limits.max_tokens_in_batch
        return max(0.0, self._window.due(oldest, now, full=full) - now)

    def _take(self, text: _Text, vector: bytes) -> list[EmbeddingOutput]:
        """Note a vector; returns the answer that is complete with it."""
        owner = text.owner
        owner.vectors[text.index] = vector
        owner.missing -= 1
        if owner.missing:
            return []
        self._open.pop(owner.request.request_id)
        self._expiring.remove(owner.request.request_id)
        vectors = [vector for vector in owner.vectors if vector is not None]
        return [EmbeddingOutput(owner.request.request_id, vectors, owner.queue_seconds)]

    def _expire(self, now: float) -> list[EmbeddingOutput]:
        outputs: list[EmbeddingOutput] = []
        for owner in self._expiring.pop_until(now):
            self.abort(owner.request.request_id)
            self._expirations += 1
            outputs.append(EmbeddingOutput(owner.request.request_id, None, owner.queue_seconds))
        return outputs


def _name(request_id: str, index: int) -> str:
    return f"{request_id}/{index}"
