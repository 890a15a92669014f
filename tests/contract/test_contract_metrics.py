"""What the server exposes is what the adapter reads."""

from pathlib import Path

import prometheus_client.parser

from paceline_operator.adapter.scrape import parse_sample
from paceline_server.engine.status import EngineStats
from paceline_server.gateway.metrics import GatewayMetrics
from paceline_server.testing import FakeEngine


def test_the_adapter_reads_depth_and_first_tokens_from_the_servers_own_page() -> None:
    metrics = GatewayMetrics(FakeEngine(Path("unused"), stats=EngineStats(waiting=3, running=4)), "smollm2")
    for seconds in (0.02, 0.3, 700.0):
        metrics.ttft.observe(seconds)
    sample = parse_sample(metrics.exposition().decode(), at=0.0)
    assert (sample.waiting, sample.running, sample.ttft.total) == (3, 4, 3)
    assert sample.ttft.counts[-1] == 1, "the slowest is beyond the last bound"


def test_a_server_without_traffic_has_a_readable_page() -> None:
    sample = parse_sample(GatewayMetrics(FakeEngine(Path("unused")), "smollm2").exposition().decode(), at=0.0)
    assert (sample.depth, sample.ttft.quantile(0.95)) == (0, None)


def test_metrics_that_other_tools_read_are_there_under_the_names_they_know() -> None:
    page = GatewayMetrics(FakeEngine(Path("unused")), "smollm2").exposition().decode()
    found = {family.name for family in prometheus_client.parser.text_string_to_metric_families(page)}
    assert {
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds",
    } <= found
