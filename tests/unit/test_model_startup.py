"""From a configuration to a warmed-up model: the phases in order, and every failure by its reason."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline_server.config import BatchingConfig, KVCacheConfig
from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.engine.status import StartupPhase
from paceline_server.errors import (
    EngineFailed,
    InvalidConfiguration,
    ModelNotFound,
    ModelUnsupported,
    NoGPU,
    OutOfMemory,
    StartupError,
)
from paceline_server.model import gpu, hub, machine, startup
from paceline_server.model.cache import KVGeometry, blocks_for_cpu, blocks_for_gpu
from paceline_server.model.loader import read_config
from paceline_server.model.startup import load
from paceline_server.model.testing import save_tiny_model, tiny_config
from paceline_server.model.transformers_backend import TransformersBackend


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """The same model, to be spoilt."""
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_phases_are_reported_at_their_begin_and_at_their_end(llama: Path) -> None:
    phases: list[StartupPhase] = []
    load(tiny_config(llama), phases.append)
    names = ["load_weights", "allocate_kv_cache", "warmup"]
    assert [phase.name for phase in phases] == [name for name in names for _ in range(2)]
    assert [phase.seconds is None for phase in phases] == [True, False] * 3


def test_a_download_is_a_phase_of_its_own(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: object, folder: Path) -> None:
        folder.mkdir(parents=True)
        for path in llama.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())

    monkeypatch.setattr(hub, "download", download)
    monkeypatch.setenv("PACELINE_MODEL_STORE", str(tmp_path))
    phases: list[StartupPhase] = []
    loaded = load(tiny_config(llama, engine={"model_path": "hf://org/tiny"}), phases.append)
    assert phases[0].name == "fetch_model"
    assert loaded.info.folder == str(tmp_path / "org" / "tiny")


def test_the_info_says_what_was_loaded(llama: Path) -> None:
    info = load(tiny_config(llama), lambda _: None).info
    token_bytes = 2 * 3 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    assert info.block_bytes >= 4 * token_bytes, "the kernels pad heads to a register's width"
    assert info.num_blocks == 4 * 2**20 // info.block_bytes
    assert info.kv_dtype == "float32"
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (256, 97, (2,))
    assert (info.dtype, info.device, info.attention_backend) == ("float32", "cpu", "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_runs(llama: Path, dtype: str) -> None:
    loaded = load(tiny_config(llama, engine={"dtype": dtype}), lambda _: None)
    assert loaded.info.dtype == dtype
    slower = "since engine.attention_backend cpu needs engine.dtype float32 or bfloat16, not float16"
    assert [slower in warning for warning in loaded.info.warnings] == ([True] if dtype == "float16" else [])
    greedy = SamplingParams(temperature=0.0)
    token = loaded.runner.execute(StepBatch([SequenceSlice([5, 6], 0, [0], greedy), SequenceSlice([7], 0, [1], None)]))
    assert token[0] in range(97)
    assert token[1] is None


def test_end_tokens_come_from_the_generation_config_first(copy: Path) -> None:
    edit(copy / "generation_config.json", eos_token_id=[2, 9])
    assert load(tiny_config(copy), lambda _: None).info.eos_token_ids == (2, 9)


def refusal(error: type[StartupError], folder: Path, **groups: dict[str, object]) -> str:
    with pytest.raises(error) as raised:
        load(tiny_config(folder, **groups), lambda _: None)
    return str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_so_before_anything_is_fetched(tmp_path: Path) -> None:
    assert "engine.device" in refusal(NoGPU, tmp_path / "nowhere", engine={"device": "cuda"})


def test_a_context_beyond_the_models_limit_is_a_configuration_mistake(llama: Path) -> None:
    assert "256" in refusal(InvalidConfiguration, llama, engine={"max_model_len": 257})


def test_a_configured_context_is_taken_over(llama: Path) -> None:
    loaded = load(tiny_config(llama, engine={"max_model_len": 40}), lambda _: None)
    assert loaded.info.max_model_len == 40


def test_a_pool_without_a_block_is_out_of_memory(llama: Path) -> None:
    assert "one block" in refusal(OutOfMemory, llama, kv_cache={"cpu_memory_gb": 1e-6})


def test_more_kv_cache_than_there_is_memory_is_refused_before_it_is_touched(llama: Path) -> None:
    message = refusal(OutOfMemory, llama, kv_cache={"cpu_memory_gb": 1e6})
    assert "kv_cache.cpu_memory_gb" in message
    assert "free" in message


def test_weights_that_do_not_fit_are_refused_by_their_size(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "available_memory", lambda: startup._STEP_BYTES + 1000)
    assert "weights take" in refusal(OutOfMemory, llama)


def test_custom_code_is_neither_run_nor_ignored(copy: Path) -> None:
    canary = copy / "canary"
    (copy / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')")
    edit(copy / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.C"})
    assert "custom code" in refusal(ModelUnsupported, copy)
    assert not canary.exists()


def test_pickled_weights_are_never_loaded(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    assert "pytorch_model.bin" in refusal(ModelUnsupported, copy)


def test_damaged_weights_are_reported_with_their_file(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-100])
    assert "model.safetensors is damaged" in refusal(ModelNotFound, copy)


def test_missing_weights_are_not_made_up(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert "layers.1.self_attn.k_proj" in refusal(ModelUnsupported, copy)


def test_weights_of_another_shape_are_not_made_up(copy: Path) -> None:
    edit(copy / "config.json", intermediate_size=32)
    assert "mlp" in refusal(ModelUnsupported, copy)


def test_a_warm_up_that_is_not_finite_fails_the_start(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert "not finite" in refusal(EngineFailed, copy)


@pytest.mark.parametrize("content", ["[]", "{", '{"model_type": 3}'])
def test_a_config_that_makes_no_sense_is_refused(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    assert refusal(ModelUnsupported, copy)


GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float16")


def test_blocks_are_what_the_memory_holds() -> None:
    assert GEOMETRY.block_bytes == 2 * 2 * 2 * 8 * 4 * 2
    assert blocks_for_cpu(512, 1.0, available=2 << 30) == (1 << 30) // 512
    assert blocks_for_gpu(512, 0.5, total=100_000, used=20_000, activations=10_000) == 20_000 // 512


def test_an_int8_block_has_a_byte_a_number_and_a_scale_for_each_key_and_value() -> None:
    assert replace(GEOMETRY, dtype="int8").block_bytes == 2 * 2 * 2 * 4 * (8 + 4)


def test_a_gpu_with_nothing_left_names_all_shares() -> None:
    with pytest.raises(OutOfMemory, match=r"allows 8\.0, weights .* take 7\.0, a step 0\.5 and CUDA graphs 0\.5"):
        blocks_for_gpu(512, 0.5, total=16 << 30, used=14 << 29, activations=1 << 29, graphs=1 << 29)


class GpuBackend:
    """A back end of a GPU that is not there."""

    reserved_bytes = 1 << 30

    def block_bytes(self, geometry: KVGeometry) -> int:
        return geometry.block_bytes

    def on_cache(self, *_: object) -> None:
        """No model: nothing is run on it."""

    def release_cache(self) -> None:
        """There is none."""


def test_the_kv_cache_leaves_a_gpus_memory_to_the_graphs_that_are_captured_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * gib, 80 * gib))
    monkeypatch.setattr(gpu, "peak_of", lambda run: 2 * gib)
    setup = startup._Setup(cast(Any, GpuBackend()), GEOMETRY, "cuda", 64, BatchingConfig())
    blocks = setup.count_blocks(KVCacheConfig(gpu_memory_fraction=0.5))
    assert blocks == (40 - 20 - 2 - 1) * gib // GEOMETRY.block_bytes


def test_only_a_back_end_that_captures_keeps_memory_for_it(llama: Path) -> None:
    model = cast(Any, SimpleNamespace(config=read_config(llama)))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    reserved = [
        TransformersBackend(model, device, max_batch_size=size).reserved_bytes
        for device, size in ((cuda, 8), (cuda, 0), (cpu, 8))
    ]
    assert reserved == [1 << 30, 0, 0]


UNLIMITED = {
    "version 2": {"cpu.max": "max 100000", "memory.max": "max"},
    "version 1": {
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "600000",
        "memory/memory.stat": "total_inactive_file 0",
    },
    "none": {},
}
LIMITED = {
    "version 2": {
        "cpu.max": "50000 100000",
        "memory.max": "1000000",
        "memory.current": "600000",
        "memory.stat": "anon 400000\ninactive_file 150000\nactive_file 50000",
    },
    "version 1": {
        "cpu/cpu.cfs_quota_us": "50000",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "1000000",
        "memory/memory.usage_in_bytes": "600000",
        "memory/memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 150000\ntotal_active_file 50000",
    },
}


def make_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.mark.parametrize("version", LIMITED)
def test_threads_and_memory_stay_within_the_containers_limits(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, LIMITED[version])
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.cores_given() == 1
    assert machine.available_memory() == 600_000


@pytest.mark.parametrize("version", UNLIMITED)
def test_without_limits_the_machine_is_the_containers(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, UNLIMITED[version])
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.cores_given() == len(os.sched_getaffinity(0))
    assert machine.available_memory() > 10_000_000
