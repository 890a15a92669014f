"""Runs one request on the engine and measures it. Called by `service`.

Leaving `generate`, for whatever reason, leaves the engine's stream: a stop string, a client that went away and a drain
deadline all abort the request there, and its blocks are free by the next step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic

from paceline_server.engine.interface import Engine, GenerationRequest, TokenOutput
from paceline_server.errors import EngineLost
from paceline_server.gateway.assembly import Delta, TextAssembly
from paceline_server.gateway.exchange import Exchange
from paceline_server.gateway.metrics import GatewayMetrics

Sink = Callable[[Delta], Awaitable[None]]


class Meter:
    """Counts and times one generation, into its exchange and the metrics.

    Args:
        on_start: called once, at the first token.
    """

    def __init__(self, exchange: Exchange, metrics: GatewayMetrics, on_start: Callable[[], None]) -> None:
        self._exchange = exchange
        self._metrics = metrics
        self._on_start = on_start

    def note(self, output: TokenOutput, delta: Delta) -> None:
        """Take what one step brought."""
        now = monotonic()
        exchange, metrics = self._exchange, self._metrics
        exchange.cached_tokens = output.cached_tokens
        exchange.completion_tokens += delta.tokens
        exchange.finish = delta.finish
        metrics.generation_tokens.inc(delta.tokens)
        if exchange.last_token is None:
            self._start(now, output)
        elif delta.tokens:
            metrics.inter_token.observe((now - exchange.last_token) / delta.tokens)
        exchange.last_token = now
        if delta.finish is not None:
            self._finish(now)

    def _start(self, now: float, output: TokenOutput) -> None:
        self._exchange.first_token = now
        self._metrics.ttft.observe(now - self._exchange.started)
        self._metrics.queue_time.observe(output.queue_seconds)
        self._metrics.prompt_tokens.inc(self._exchange.prompt_tokens)
        self._on_start()

    def _finish(self, now: float) -> None:
        exchange = self._exchange
        assert exchange.first_token is not None
        self._metrics.e2e.observe(now - exchange.started)
        if exchange.completion_tokens > 1:
            self._metrics.time_per_output_token.observe((now - exchange.first_token) / (exchange.completion_tokens - 1))


async def generate(
    engine: Engine, request: GenerationRequest, assembly: TextAssembly, meter: Meter, sink: Sink
) -> None:
    """Generate one answer; `sink` gets every delta, the last one with the finish reason.

    Raises:
        EngineUnavailable: no engine is ready.
        EngineLost: the engine died on the way.
        Overloaded: the engine says that it would be too late.
        DeadlineExceeded: the request's time was over before its first token.
    """
    async with engine.stream(request) as outputs:
        async for output in outputs:
            delta = assembly.push(output.token_ids, output.finish)
            meter.note(output, delta)
            await sink(delta)
            if delta.finish is not None:
                return
    raise EngineLost("the engine ended this request without a reason")
