"""What /metrics tells: the gateway's own counts and times, and the engine's numbers. Used by the whole package.

Names are `paceline_*` in seconds and tokens; the ones that other tools read (`vllm:*`) are exported beside them. The
operator's adapter reads some of them: docs/reference/metrics.md and tests/contract hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline_server.config.tenants import TenantConfig
from paceline_server.engine.interface import Engine, ModelInfo
from paceline_server.engine.status import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OUTCOMES = ("completed", "refused", "cancelled", "failed")
REJECTIONS = (
    "invalid_request",
    "context_length_exceeded",
    "not_served",
    "payload_too_large",
    "request_timeout",
    "overloaded",
    "draining",
    "engine_unavailable",
    "deadline_exceeded",
    "unauthorized",
    "insufficient_allowance",
    "tier_not_allowed",
)

# Dense where objectives are set: the adapter interpolates a p95 between these bounds.
_LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5,
    10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_TOKEN_BUCKETS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class GatewayMetrics:
    """The metrics of one server, in a registry of their own.

    Args:
        model: label of the `vllm:*` aliases.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self.ttft = self._histogram("paceline_ttft_seconds", "From a request's arrival to its first token")
        self.inter_token = self._histogram(
            "paceline_inter_token_latency_seconds", "Between two tokens of a request", _TOKEN_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "paceline_time_per_output_token_seconds", "Mean time per token after the first, by request", _TOKEN_BUCKETS
        )
        self.e2e = self._histogram("paceline_e2e_latency_seconds", "From a request's arrival to its last token")
        self.queue_time = self._histogram(
            "paceline_queue_time_seconds", "From the engine's receipt of a request to its first scheduling"
        )
        self.prompt_tokens = self._counter("paceline_prompt_tokens", "Prompt tokens of requests that started")
        self.generation_tokens = self._counter("paceline_generation_tokens", "Tokens generated and counted")
        self.requests = self._counter("paceline_requests", "Requests to generate, by outcome", "outcome", OUTCOMES)
        self.rejections = self._counter("paceline_rejections", "Requests refused, by reason", "reason", REJECTIONS)
        self.cancellations = self._counter("paceline_cancellations", "Requests whose client went away")
        self.tenants = TenantMetrics(self._registry)
        self._registry.register(_EngineNumbers(engine))
        self._registry.register(_Aliases(engine, self.ttft, model))

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS) -> Histogram:
        return Histogram(name, about, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, about: str, label: str | None = None, values: Iterable[str] = ()) -> Counter:
        counter = Counter(name, about, [label] if label else [], registry=self._registry)
        for value in values:
            counter.labels(value)  # a series that is there from the start shows its first increase
        return counter


class TenantMetrics:
    """What tenants use; as many series as the configuration has tenants."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tokens = Counter(
            "paceline_tenant_tokens", "Tokens by tenant and kind", ["tenant", "kind"], registry=registry
        )
        self.cost = Counter(
            "paceline_tenant_cost", "Cost by tenant, where prices are configured", ["tenant"], registry=registry
        )
        self.rejections = Counter(
            "paceline_tenant_rejections", "Requests over a tenant's limit", ["tenant", "reason"], registry=registry
        )

    def begin(self, tenant: TenantConfig) -> None:
        """Make a tenant's series: one that is there from the start shows its first increase."""
        for kind in ("input", "cached_input", "output"):
            self.tokens.labels(tenant.name, kind)
        if tenant.prices is not None:
            self.cost.labels(tenant.name)
        for limit in ("requests_per_minute", "tokens_per_minute", "daily_tokens"):
            if getattr(tenant, limit) is not None:
                self.rejections.labels(tenant.name, limit)


class _EngineNumbers(Collector):
    """The engine's newest statistics, read when scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        status = self._engine.status
        yield GaugeMetricFamily(
            "paceline_ready", "1 while the engine is warmed up and answers", value=float(status.ready)
        )
        startup = GaugeMetricFamily("paceline_startup_seconds", "Duration of a start-up phase", labels=["phase"])
        for phase in status.phases:
            if phase.seconds is not None:
                startup.add_metric([phase.name], phase.seconds)
        yield startup
        yield from _gauges(self._engine.stats)
        yield from _counters(self._engine.stats)
        yield from _swaps(self._engine)
        yield from _engine_facts(self._engine.info)
        yield from _cache_facts(self._engine.info)
        yield _offloaded(self._engine.stats)
        yield CounterMetricFamily(
            "paceline_engine_restarts", "Times that a lost engine was started again", value=self._engine.restarts
        )


def _gauges(stats: EngineStats) -> Iterable[Metric]:
    for name, about, value in (
        ("paceline_requests_waiting", "Requests that wait to be scheduled", stats.waiting),
        ("paceline_requests_running", "Requests that hold KV blocks", stats.running),
        ("paceline_kv_cache_usage_ratio", "Share of the KV blocks in use by running requests", stats.kv_usage),
        ("paceline_waiting_tokens", "Tokens to compute of the requests that wait", stats.waiting_tokens),
        ("paceline_oldest_waiting_seconds", "Age of the request that has waited longest", stats.oldest_waiting_seconds),
        ("paceline_batch_sequences", "Sequences in the last step", stats.batch_sequences),
        ("paceline_batch_tokens", "Tokens in the last step", stats.batch_tokens),
    ):
        yield GaugeMetricFamily(name, about, value=float(value))
    yield _labelled(
        "paceline_predicted_ttft_seconds",
        "Forecast of the time to the first token of a short request that comes now",
        "tier",
        stats.predicted_ttft_seconds,
    )
    yield _labelled(
        "paceline_step_cost_seconds",
        "What a step takes by itself, by token, and by pair of tokens",
        "of",
        stats.step_costs,
    )


def _labelled(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    gauge = GaugeMetricFamily(name, about, labels=[label])
    for of, value in values.items():
        gauge.add_metric([of], value)
    return gauge


def _counters(stats: EngineStats) -> Iterable[Metric]:
    for name, about, value in (
        ("paceline_preemptions", "Running requests put back for want of KV blocks", stats.preemptions),
        ("paceline_expirations", "Requests that ran out of their own time, waiting or running", stats.expirations),
        ("paceline_steps", "Steps of the engine", stats.steps),
        ("paceline_computed_tokens", "Tokens computed, prompt and output", stats.computed_tokens),
        ("paceline_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache", stats.prefix_queried_tokens),
        ("paceline_prefix_hit_tokens", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens),
    ):
        yield CounterMetricFamily(name, about, value=value)
    stages = CounterMetricFamily("paceline_step_stage_seconds", "Time of the step loop by stage", labels=["stage"])
    for stage, seconds in stats.stage_seconds.items():
        stages.add_metric([stage], seconds)
    yield stages


def _swaps(engine: Engine) -> Iterable[Metric]:
    stats, block_bytes = engine.stats, engine.info.block_bytes if engine.info else 0
    blocks = CounterMetricFamily(
        "paceline_swapped_blocks", "KV blocks copied to host memory by preemptions, and back", labels=["direction"]
    )
    volume = CounterMetricFamily("paceline_swapped_bytes", "Bytes of these blocks", labels=["direction"])
    for direction, count in (("out", stats.swapped_out_blocks), ("in", stats.swapped_in_blocks)):
        blocks.add_metric([direction], count)
        volume.add_metric([direction], count * block_bytes)
    yield from (blocks, volume)


def _engine_facts(info: ModelInfo | None) -> Iterable[Metric]:
    """How the model is computed, as labels of a constant."""
    if info is not None:
        labels = {"device": info.device, "dtype": info.dtype, "attention_backend": info.attention_backend}
        slower = "true" if info.warnings else "false"
        yield _constant("paceline_engine_info", "How the model is computed; always 1", {**labels, "slower": slower})


def _cache_facts(info: ModelInfo | None) -> Iterable[Metric]:
    """What the KV cache is, as labels of a constant; and as Gateway API Inference Extension reads it."""
    if info is None or info.num_blocks == 0:
        return
    blocks, size = str(info.num_blocks), str(info.block_size)
    labels = {"dtype": info.kv_dtype, "blocks": blocks, "block_size": size, "block_bytes": str(info.block_bytes)}
    alias = {"cache_dtype": info.kv_dtype, "num_gpu_blocks": blocks, "block_size": size}
    yield _constant("paceline_kv_cache_info", "Number format and size of the KV cache; always 1", labels)
    yield _constant("vllm:cache_config_info", "Alias of paceline_kv_cache_info", alias)


def _constant(name: str, about: str, facts: Mapping[str, str]) -> Metric:
    gauge = GaugeMetricFamily(name, about, labels=list(facts))
    gauge.add_metric(list(facts.values()), 1.0)
    return gauge


def _offloaded(stats: EngineStats) -> Metric:
    blocks = CounterMetricFamily(
        "paceline_offloaded_blocks", "KV blocks that the device evicted and that were kept, by event", labels=["event"]
    )
    for event, count in stats.offloaded_blocks.items():
        blocks.add_metric([event], count)
    return blocks


class _Aliases(Collector):
    """The same numbers under the names that Gateway API Inference Extension, KEDA recipes and dashboards read."""

    def __init__(self, engine: Engine, ttft: Histogram, model: str) -> None:
        self._engine = engine
        self._ttft = ttft
        self._labels = {"model_name": model}

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        for name, about, value in (
            ("vllm:num_requests_waiting", "Alias of paceline_requests_waiting", stats.waiting),
            ("vllm:num_requests_running", "Alias of paceline_requests_running", stats.running),
            ("vllm:kv_cache_usage_perc", "Alias of paceline_kv_cache_usage_ratio", stats.kv_usage),
        ):
            gauge = GaugeMetricFamily(name, about, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), float(value))
            yield gauge
        for metric in self._ttft.collect():
            yield self._renamed(metric, "vllm:time_to_first_token_seconds")

    def _renamed(self, metric: Metric, name: str) -> Metric:
        alias = Metric(name, f"Alias of {metric.name}", metric.type)
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            alias.add_sample(name + suffix, {**sample.labels, **self._labels}, sample.value)
        return alias
