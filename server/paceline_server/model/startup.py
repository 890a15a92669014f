"""From a configuration to a warmed-up model, phase by phase. `engine.process` calls `load` once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline_server.config import BatchingConfig, KVCacheConfig, ServerConfig
from paceline_server.engine.interface import ModelInfo
from paceline_server.engine.loop import Loaded
from paceline_server.engine.offload import BlockFiles
from paceline_server.errors import OutOfMemory
from paceline_server.model.backend import Backend, CpuBackend, choose_backend
from paceline_server.model.block_files import BlockFolder
from paceline_server.model.cache import (
    GIB,
    BlockStorage,
    KVGeometry,
    blocks_for_cpu,
    blocks_for_gpu,
    host_bytes_for,
)
from paceline_server.model.config_file import complete, eos_token_ids
from paceline_server.model.fused_layers import head_size, kv_heads
from paceline_server.model.identity import kv_identity
from paceline_server.model.machine import available_memory, choose_device, choose_dtype, choose_kv_dtype
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
    folder = find_model(config.engine.model_path, on_phase)
    with phase("load_weights", on_phase):
        model_config = complete(folder)
        longest = context_length(model_config, config.engine.max_model_len)
        dtype = choose_dtype(config.engine.dtype, model_config["dtype"], device)
        kv_dtype = choose_kv_dtype(config.kv_cache.dtype, dtype, config.engine.quantization)
        choice = choose_backend(config.engine, model_config, dtype, kv_dtype, device)
        available = available_memory() - _STEP_BYTES
        if choice.name == "cpu":
            backend: Backend = CpuBackend.load(folder, model_config, dtype, available, config)
        else:
            from paceline_server.model import transformers_backend  # noqa: PLC0415 (it brings transformers and torch)

            backend = transformers_backend.load(folder, choice.name, dtype, device, available, longest, config)
    setup = _Setup(backend, _geometry(model_config, config.kv_cache, kv_dtype), device, longest, config.batching)
    with phase("allocate_kv_cache", on_phase):
        num_blocks = setup.count_blocks(config.kv_cache)
        runner = setup.runner(num_blocks, config.kv_cache)
        memory = _HostMemory(config.kv_cache, runner.model.storage)
    with phase("warmup", on_phase):
        setup.warm_up(runner, num_blocks)
        copy_seconds = runner.copy_seconds()
    identity = memory.identity(folder, (dtype, choice.name, config.engine.quantization, kv_dtype))
    info = ModelInfo(
        folder=str(folder),
        max_model_len=longest,
        vocab_size=int(model_config["vocab_size"]),
        eos_token_ids=eos_token_ids(folder, model_config),
        num_blocks=num_blocks,
        block_size=config.kv_cache.block_size_tokens,
        dtype=dtype,
        device=device,
        attention_backend=choice.name,
        block_bytes=runner.model.storage.block_bytes,
        swap_slots=memory.swap_slots,
        block_copy_seconds=copy_seconds,
        offload_slots=memory.offload_slots,
        offload_files=memory.offload_files,
        kv_identity=identity,
        deterministic=choice.name == "cpu",
        warnings=() if choice.drawback is None else (choice.drawback,),
        kv_dtype=kv_dtype,
    )
    return Loaded(runner, info, memory.files(identity), runner.model.on_idle)


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
        device: str,
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
        if self._device == "cpu":
            return blocks_for_cpu(self._block_bytes, config.cpu_memory_gb, available_memory() - _STEP_BYTES)
        from paceline_server.model import gpu  # noqa: PLC0415 (it brings torch)

        activations = gpu.peak_of(self._trial())
        self._backend.release_cache()
        gpu.give_back()
        total, used = gpu.total_and_used()
        return blocks_for_gpu(
            self._block_bytes,
            config.gpu_memory_fraction,
            total=total,
            used=used,
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
            beside = num_blocks * self._block_bytes if self._device == "cpu" else 0
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
        except self._backend.out_of_memory as error:
            raise OutOfMemory(f"a step of the largest size does not fit beside the KV cache: {error}") from None

    def _trial(self) -> Callable[[], None]:
        """A run of the largest steps on a cache of its own, which is allocated now and goes with the run."""
        blocks = -(-self._batching.max_tokens_in_batch // self.geometry.block_size)
        runner = self.runner(blocks)
        return lambda: self.warm_up(runner, blocks)


def _geometry(config: Mapping[str, Any], cache: KVCacheConfig, kv_dtype: str) -> KVGeometry:
    return KVGeometry(
        layers=int(config["num_hidden_layers"]),
        kv_heads=kv_heads(config),
        head_dim=head_size(config),
        block_size=cache.block_size_tokens,
        dtype=kv_dtype,
    )
