"""What the probes and the scrapers of a cluster read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline_server.engine.status import EngineStats, EngineStatus, StartupPhase
from paceline_server.gateway.stall import HUNG_SECONDS, stall_limit
from paceline_server.testing import FakeEngine, served, server_config, write_model

A = 66
COMPLETION = {"model": "tiny", "prompt": "Hi", "max_tokens": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, None)
    return path


async def test_readyz_tells_the_phases_of_the_start_and_the_one_under_way_until_it_is_ready(folder: Path) -> None:
    engine = FakeEngine(folder)
    async with served(engine) as server:
        response = await server.client.get("/readyz")
        body = await response.json()
        assert (response.status, body["ready"], body["reason"], body["phase"]) == (200, True, "Ready", None)
        engine.ready = False
        response = await server.client.get("/readyz")
        assert (response.status, await response.json()) == (
            503,
            {
                "ready": False,
                "phase": "load_weights",
                "phases": [{"name": "start_engine", "seconds": 2.0}, {"name": "load_weights", "seconds": None}],
                "reason": "Loading",
                "message": "it loads",
                "warnings": [],
            },
        )
        assert (await server.client.get("/healthz")).status == 200


async def test_a_ready_engine_without_its_tokenizer_is_not_ready(folder: Path) -> None:
    async with served(FakeEngine(folder)) as server:
        server.gateway.texts._text = None
        response = await server.client.get("/readyz")
        body = await response.json()
        assert (response.status, body["reason"], body["message"]) == (503, "Loading", "the tokenizer is being loaded")
        refusal = await server.client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"})
        assert refusal.status == 503
        assert "the tokenizer is being loaded" in (await refusal.json())["error"]["message"]


async def test_healthz_fails_when_the_step_loop_hangs_and_not_under_load(folder: Path) -> None:
    engine = FakeEngine(folder, stats=EngineStats(waiting=1000, running=64))
    async with served(engine) as server:
        engine.step_age = HUNG_SECONDS - 1
        assert (await server.client.get("/healthz")).status == 200
        engine.step_age = HUNG_SECONDS + 1
        assert (await server.client.get("/healthz")).status == 503
        engine.step_age = None
        assert (await server.client.get("/healthz")).status == 200


async def test_a_stalled_engine_gets_no_traffic_until_it_moves_again(folder: Path) -> None:
    """Long before it counts as hung; what was sent all the same is not refused for it."""
    engine = FakeEngine(folder, [A])
    async with served(engine) as server:
        engine.step_age = 29.0
        assert (await server.client.get("/readyz")).status == 200
        engine.step_age = 31.0
        response = await server.client.get("/readyz")
        body = await response.json()
        assert (response.status, body["ready"], body["reason"]) == (503, False, "EngineStalled")
        assert "has not moved for 31 s" in body["message"]
        assert (await server.client.get("/healthz")).status == 200
        assert (await server.client.post("/v1/completions", json=COMPLETION)).status == 200
        engine.step_age = 0.0
        assert (await server.client.get("/readyz")).status == 200


@pytest.mark.parametrize(("warmup", "limit"), [(None, 30.0), (2.0, 30.0), (15.0, 60.0), (100.0, HUNG_SECONDS)])
def test_a_machine_on_which_honest_steps_are_slow_has_longer_to_make_one(warmup: float | None, limit: float) -> None:
    phases = (StartupPhase("load_weights", 500.0), StartupPhase("warmup", warmup))
    assert stall_limit(EngineStatus(True, "Ready", "the engine serves", phases)) == limit


async def test_the_engines_numbers_are_there_under_both_names(folder: Path) -> None:
    stats = EngineStats(
        waiting=3,
        running=2,
        kv_usage=0.5,
        preemptions=7,
        swapped_out_blocks=5,
        stage_seconds={"execute": 1.5},
        step_costs={"token": 3e-5},
        predicted_ttft_seconds={"batch": 1.5},
    )
    async with served(FakeEngine(folder, stats=stats, restarts=1)) as server:
        response = await server.client.get("/metrics")
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        samples = server.scrape()
    for name, value in {
        "paceline_requests_waiting": 3,
        "paceline_requests_running": 2,
        "paceline_kv_cache_usage_ratio": 0.5,
        "paceline_preemptions_total": 7,
        'paceline_swapped_blocks_total{direction="out"}': 5,
        'paceline_swapped_bytes_total{direction="in"}': 0,
        "paceline_engine_restarts_total": 1,
        "paceline_ready": 1,
        'paceline_startup_seconds{phase="load_weights"}': 1.0,
        'paceline_step_stage_seconds_total{stage="execute"}': 1.5,
        'paceline_step_cost_seconds{of="token"}': 3e-5,
        'paceline_predicted_ttft_seconds{tier="batch"}': 1.5,
        'vllm:num_requests_waiting{model_name="tiny"}': 3,
        'vllm:num_requests_running{model_name="tiny"}': 2,
        'vllm:kv_cache_usage_perc{model_name="tiny"}': 0.5,
    }.items():
        assert samples[name] == value, name


async def test_a_request_is_counted_and_timed(folder: Path) -> None:
    """Three tokens: one time to first token, two gaps, one mean of them, and the alias in step."""
    async with served(FakeEngine(folder, [A, A, A])) as server:
        await server.client.post("/v1/completions", json=COMPLETION)
        samples = server.scrape()
    for name, value in {
        "paceline_ttft_seconds_count": 1,
        "paceline_inter_token_latency_seconds_count": 2,
        "paceline_time_per_output_token_seconds_count": 1,
        "paceline_e2e_latency_seconds_count": 1,
        "paceline_queue_time_seconds_count": 1,
        "paceline_generation_tokens_total": 3,
        'paceline_requests_total{outcome="completed"}': 1,
        'vllm:time_to_first_token_seconds_count{model_name="tiny"}': 1,
    }.items():
        assert samples[name] == value, name
    assert samples["paceline_prompt_tokens_total"] > 0
    assert samples["paceline_e2e_latency_seconds_sum"] >= samples["paceline_ttft_seconds_sum"] > 0
    assert 'paceline_inter_token_latency_seconds_bucket{le="0.001"}' in samples


async def test_series_are_there_before_anything_happened(folder: Path) -> None:
    async with served(FakeEngine(folder)) as server:
        samples = server.scrape()
    for outcome in ("completed", "refused", "cancelled", "failed"):
        assert samples[f'paceline_requests_total{{outcome="{outcome}"}}'] == 0
    assert samples['paceline_rejections_total{reason="overloaded"}'] == 0
    assert samples["paceline_cancellations_total"] == 0


def test_the_gateway_imports_neither_torch_nor_transformers() -> None:
    """Its process stays light; the template's environment is in a process of its own."""
    program = (
        "import importlib, pkgutil, sys, paceline_server.gateway as gateway\n"
        "names = [m.name for m in pkgutil.iter_modules(gateway.__path__) if m.name != 'renderer']\n"
        "assert 'serve' in names\n"
        "[importlib.import_module('paceline_server.gateway.' + name) for name in names]\n"
        "print(*sorted({'torch', 'transformers', 'jinja2'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


@pytest.mark.parametrize(("warnings", "slower"), [((), "false"), (("float16 is slow here; set float32",), "true")])
async def test_what_makes_the_engine_slower_stands_in_readyz_and_in_a_metric(
    folder: Path, warnings: tuple[str, ...], slower: str
) -> None:
    async with served(FakeEngine(folder, warnings=warnings)) as server:
        response = await server.client.get("/readyz")
        assert (await response.json())["warnings"] == list(warnings)
        lines = server.gateway.metrics.exposition().decode().splitlines()
    facts = f'attention_backend="fake",device="cpu",dtype="float32",slower="{slower}"'
    assert f"paceline_engine_info{{{facts}}} 1.0" in lines


async def test_what_the_kv_cache_is_stands_in_the_labels_of_a_constant(folder: Path) -> None:
    async with served(FakeEngine(folder)) as server:
        lines = server.gateway.metrics.exposition().decode().splitlines()
    facts = 'block_bytes="0",block_size="16",blocks="64",dtype="float32"'
    assert f"paceline_kv_cache_info{{{facts}}} 1.0" in lines
    assert 'vllm:cache_config_info{block_size="16",cache_dtype="float32",num_gpu_blocks="64"} 1.0' in lines


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hf://ORG/NAME", "ORG/NAME"),
        ("hf://ORG/NAME@main", "ORG/NAME"),
        ("file:///mnt/models/tiny", "tiny"),
        ("/mnt/models/tiny/", "tiny"),
    ],
)
async def test_a_model_without_served_names_is_served_under_its_own(folder: Path, path: str, name: str) -> None:
    config = server_config()
    engine = config.engine.model_copy(update={"served_model_names": (), "model_path": path})
    async with served(FakeEngine(folder, [A]), config=config.model_copy(update={"engine": engine})) as server:
        assert server.gateway.names == (name,)
