"""Runs one request on the engine and measures it. Called by `service`.

Leaving `generate`, for whatever reason, leaves the engine's stream: a client that went away and a drain deadline abort
the request there with all its answers, and their blocks are free by the next step. A stop string ends one answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from paceline_server.engine.interface import Engine, GenerationRequest, TokenOutput
from paceline_server.errors import EngineLost
from paceline_server.gateway.assembly import Delta, TextAssembly
from paceline_server.gateway.exchange import Exchange
from paceline_server.gateway.metrics import GatewayMetrics

Sink = Callable[[int, Delta], Awaitable[None]]
"""Takes the index of an answer, and what came for it."""


@dataclass(slots=True)
class _Pace:
    """Times of one answer's tokens."""

    first: float
    last: float
    tokens: int


class Meter:
    """Counts and times one request, into its exchange and the metrics.

    Args:
        on_start: called once, at the first token.
    """

    def __init__(self, exchange: Exchange, metrics: GatewayMetrics, on_start: Callable[[], None]) -> None:
        self._exchange = exchange
        self._metrics = metrics
        self._on_start = on_start
        self._paces: dict[int, _Pace] = {}

    def note(self, output: TokenOutput, delta: Delta) -> None:
        """Take what one step brought for one answer."""
        now = monotonic()
        exchange, metrics = self._exchange, self._metrics
        exchange.completion_tokens += delta.tokens
        metrics.generation_tokens.inc(delta.tokens)
        if exchange.first_token is None:
            self._start(now, output)
        pace = self._paces.get(output.index)
        if pace is None:
            pace = self._paces[output.index] = _Pace(now, now, 0)
        elif delta.tokens:
            metrics.inter_token.observe((now - pace.last) / delta.tokens)
        pace.last = now
        pace.tokens += delta.tokens
        if delta.finish is not None and pace.tokens > 1:
            metrics.time_per_output_token.observe((now - pace.first) / (pace.tokens - 1))

    def finish(self, last: Delta) -> None:
        """All answers have ended, with this delta of the last one."""
        self._exchange.finish = last.finish
        self._metrics.e2e.observe(monotonic() - self._exchange.started)

    def _start(self, now: float, output: TokenOutput) -> None:
        # The first answer brings the prompt; what the others find of it is its own request's work.
        self._exchange.cached_tokens = output.cached_tokens
        self._exchange.first_token = now
        self._metrics.ttft.observe(now - self._exchange.started)
        self._metrics.queue_time.observe(output.queue_seconds)
        self._metrics.prompt_tokens.inc(self._exchange.prompt_tokens)
        self._on_start()


async def generate(
    engine: Engine, request: GenerationRequest, assemblies: Sequence[TextAssembly], meter: Meter, sink: Sink
) -> None:
    """Generate all answers to one request; `sink` gets every delta, an answer's last one with its finish reason.

    Args:
        assemblies: fresh, one for each answer.

    Raises:
        EngineUnavailable: no engine is ready.
        EngineLost: the engine died on the way.
        InvalidRequest: the engine can never serve it.
        Overloaded: the engine says that it would be too late.
        DeadlineExceeded: the request's time was over before its first token.
    """
    unfinished = set(range(request.n))
    async with engine.stream(request) as outputs:
        async for output in outputs:
            if output.index not in unfinished:
                continue  # the engine had not heard yet that it was cut
            delta = assemblies[output.index].push(output.token_ids, output.finish)
            meter.note(output, delta)
            if delta.finish is not None:
                unfinished.remove(output.index)
                if output.finish is None and unfinished:
                    engine.cut(request.request_id, output.index)
            if not unfinished:
                meter.finish(delta)
            await sink(output.index, delta)
            if not unfinished:
                return
    raise EngineLost("the engine ended this request without a reason")
