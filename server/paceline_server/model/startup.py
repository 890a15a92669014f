"""From a configuration to a warmed-up model, phase by phase. `engine.process` calls `load` once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline_server.config import BatchingConfig, KVCacheConfig, ServerConfig
from paceline_server.engine.interface import ModelInfo
from paceline_server.engine.loop import Loaded
from paceline_server.engine.offload import BlockFiles
from paceline_server.errors import OutOfMemory
from paceline_server.model.backend import Backend, CpuBackend, TransformersBackend, choose_backend, triton_attention
from paceline_server.model.block_files import BlockFolder
from paceline_server.model.cache import (
    GIB,
    BlockStorage,
    KVGeometry,
    blocks_for_cpu,
    blocks_for_gpu,
    host_bytes_for,
)
from paceline_server.model.graphed_model import GraphedModel
from paceline_server.model.identity import kv_identity
from paceline_server.model.loader import CausalModel, eos_token_ids, load_model, read_config
from paceline_server.model.machine import available_memory, choose_device, choose_dtype, cores_given
from paceline_server.model.phases import OnPhase, find_model, phase
from paceline_server.model.runner import ModelRunner, largest_batches
from paceline_server.model.support import context_length

_STEP_BYTES = 256 << 20
"""Memory left free on a CPU beside weights and KV cache: what a step needs."""


def load(config: ServerConfig, on_phase: OnPhase) -> Loaded:
    """Fetch, load and warm up the configured model.

    Args:
        config: of the whole server.
        on_phase: told of each phase at its begin, with seconds None, and at its end.

    Raises:
        StartupError: see the subclasses; every one names what to do.
    """
    device = choose_device(config.engine.device)
    if device.type == "cpu":
        torch.set_num_threads(config.engine.threads or cores_given())
    folder = find_model(config.engine.model_path, on_phase)
    with phase("load_weights", on_phase):
        model_config = read_config(folder)
        longest = context_length(model_config.to_dict(), config.engine.max_model_len)
        dtype = choose_dtype(config.engine.dtype, model_config.dtype, device)
        int8_cache = config.kv_cache.dtype == "int8"
        backend_name = choose_backend(config.engine, model_config, dtype, device, int8_cache=int8_cache)
        model = load_model(folder, model_config, dtype, device, available_memory() - _STEP_BYTES)
        backend = _backend(backend_name, model, device, longest, config)
        del model
    setup = _Setup(backend, _geometry(model_config, config.kv_cache, dtype), device, longest, config.batching)
    with phase("allocate_kv_cache", on_phase):
        num_blocks = setup.count_blocks(config.kv_cache)
        runner = setup.runner(num_blocks, config.kv_cache)
        memory = _HostMemory(config.kv_cache, runner.model.storage)
    with phase("warmup", on_phase):
        setup.warm_up(runner, num_blocks)
        copy_seconds = runner.copy_seconds()
    dtype_name, kv_dtype = (str(one).removeprefix("torch.") for one in (dtype, setup.geometry.dtype))
    identity = memory.identity(folder, (dtype_name, backend_name, config.engine.quantization, kv_dtype))
    info = ModelInfo(
        folder=str(folder),
        max_model_len=longest,
        vocab_size=int(model_config.vocab_size),
        eos_token_ids=eos_token_ids(folder, model_config),
        num_blocks=num_blocks,
        block_size=config.kv_cache.block_size_tokens,
        dtype=dtype_name,
        device=device.type,
        attention_backend=backend_name,
        block_bytes=runner.model.storage.block_bytes,
        swap_slots=memory.swap_slots,
        block_copy_seconds=copy_seconds,
        offload_slots=memory.offload_slots,
        offload_files=memory.offload_files,
        kv_identity=identity,
        deterministic=backend_name == "cpu",
        kv_dtype=kv_dtype,
    )
    on_idle = runner.model.capture_wanted if isinstance(runner.model, GraphedModel) else None
    return Loaded(runner, info, memory.files(identity), on_idle)


class _HostMemory:
    """How the slots of host memory are shared out, and the disk below them."""

    def __init__(self, config: KVCacheConfig, storage: BlockStorage) -> None:
        self._config = config
        self._storage = storage
        self.swap_slots = int(config.swap_space_gb * GIB) // storage.block_bytes
        self.offload_slots = len(storage.host) - self.swap_slots if config.offload.host_memory_gb else 0
        self.offload_files = int(config.offload.disk_gb * GIB) // storage.block_bytes

    def identity(self, folder: Path, facts: tuple[object, ...]) -> str:
        """Of the blocks, which depend on the model's files and these facts; see `model.identity`."""
        layout = (self._config.block_size_tokens, self._storage.block_bytes)
        return kv_identity(folder, facts + layout, every_byte=self._config.offload.disk_path is not None)

    def files(self, identity: str) -> BlockFiles | None:
        """The blocks on disk; None where there are to be none.

        Raises:
            InvalidConfiguration: the folder cannot be used.
        """
        path = self._config.offload.disk_path
        return None if path is None else BlockFolder(Path(path), self._storage.host, identity)


class _Setup:
    """A loaded model on its way to a runner: sizes the KV cache, puts it in place, warms it up."""

    def __init__(
        self,
        backend: Backend,
        geometry: KVGeometry,
        device: torch.device,
        longest: int,
        batching: BatchingConfig,
    ) -> None:
        self._backend = backend
        self.geometry = geometry
        self._block_bytes = backend.block_bytes(geometry)
        self._device = device
        self._longest = longest
        self._batching = batching

    def count_blocks(self, config: KVCacheConfig) -> int:
        """Blocks that the configured memory holds.

        Raises:
            OutOfMemory: not even one.
        """
        if self._device.type == "cpu":
            return blocks_for_cpu(self._block_bytes, config.cpu_memory_gb, available_memory() - _STEP_BYTES)
        activations = self._measure_step()
        free, total = torch.cuda.mem_get_info(self._device)
        return blocks_for_gpu(
            self._block_bytes,
            config.gpu_memory_fraction,
            total=total,
            used=total - free,
            activations=activations,
            graphs=self._backend.reserved_bytes,
        )

    def runner(self, num_blocks: int, config: KVCacheConfig | None = None) -> ModelRunner:
        """Allocate the KV cache and join it to the model.

        Args:
            config: says how much host memory goes with it; None is none.

        Raises:
            OutOfMemory: device or machine have less than they said.
        """
        host_bytes = 0
        if config is not None:
            beside = num_blocks * self._block_bytes if self._device.type == "cpu" else 0
            available = available_memory() - _STEP_BYTES - beside
            host_bytes = host_bytes_for(config.swap_space_gb, config.offload.host_memory_gb, available)
        model = self._backend.on_cache(self.geometry, num_blocks, host_bytes)
        return ModelRunner(model, self.geometry.block_size)

    def warm_up(self, runner: ModelRunner, num_blocks: int) -> None:
        """Run the largest prefill and the largest decode.

        Raises:
            EngineFailed: a logit is not finite.
            OutOfMemory: a step does not fit.
        """
        size = self.geometry.block_size
        longest = min(self._longest, num_blocks * size)
        try:
            for batch in largest_batches(
                self._batching.max_batch_size, self._batching.max_tokens_in_batch, longest, size
            ):
                runner.warm_up(batch)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"a step of the largest size does not fit beside the KV cache: {error}") from None

    def _measure_step(self) -> int:
        """Bytes of GPU memory that the largest steps need beside weights and KV cache."""
        blocks = -(-self._batching.max_tokens_in_batch // self.geometry.block_size)
        runner = self.runner(blocks)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self.warm_up(runner, blocks)
        needed = torch.cuda.max_memory_allocated(self._device) - before
        self._backend.release_cache()
        del runner
        torch.cuda.empty_cache()
        return needed


def _backend(name: str, model: CausalModel, device: torch.device, longest: int, config: ServerConfig) -> Backend:
    if name == "cpu":
        threads = config.engine.threads or cores_given()
        return CpuBackend(model, threads, int8=config.engine.quantization == "int8")
    if name == "triton":
        return TransformersBackend(model, device, triton_attention(longest), config.batching.max_batch_size)
    return TransformersBackend(model, device)


def _geometry(config: Any, cache: KVCacheConfig, dtype: torch.dtype) -> KVGeometry:
    heads = int(config.num_attention_heads)
    return KVGeometry(
        layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        block_size=cache.block_size_tokens,
        dtype=torch.int8 if cache.dtype == "int8" else dtype,
    )
