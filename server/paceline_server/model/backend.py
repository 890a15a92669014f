"""How a loaded model is computed: through transformers with the reference attention, or fused into the CPU kernels.

`startup` chooses before it reads the weights, because the choice can be refused, and builds the back end after.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from paceline_server.config import EngineConfig
from paceline_server.errors import InvalidConfiguration, NativeUnavailable, OutOfMemory
from paceline_server.model import native
from paceline_server.model.attention.cpu import CpuAttention
from paceline_server.model.attention.hook import attach
from paceline_server.model.attention.interface import PagedAttention
from paceline_server.model.attention.reference import ReferenceAttention
from paceline_server.model.cache import KVCache, KVGeometry
from paceline_server.model.fused_decoder import FusedDecoder, FusedModel
from paceline_server.model.fused_layers import obstacle_to_fusing
from paceline_server.model.graphed_model import GraphedModel, StationaryAttention
from paceline_server.model.graphs import CudaGraphs, GraphBook, capture_sizes
from paceline_server.model.loader import CausalModel
from paceline_server.model.runner import StepModel, TransformersModel
from paceline_server.model.support import layer_windows

log = logging.getLogger("paceline.model")

_GRAPH_BYTES = 1 << 30
"""Device memory that captured steps may hold. They are captured later: the KV cache leaves it free."""


class Backend(Protocol):
    """A loaded model without a KV cache."""

    @property
    def reserved_bytes(self) -> int:
        """Device memory that the KV cache must leave to what comes later."""
        ...

    def block_bytes(self, geometry: KVGeometry) -> int:
        """Bytes that one block will take."""
        ...

    def on_cache(self, geometry: KVGeometry, num_blocks: int, host_bytes: int = 0) -> StepModel:
        """Allocate a KV cache and join it to the model.

        Args:
            host_bytes: of host memory for slots that blocks can be moved to.

        Raises:
            OutOfMemory: the device has less than it said.
        """
        ...

    def release_cache(self) -> None:
        """Let go of the cache of the last `on_cache`."""
        ...


class TransformersBackend:
    """A model of transformers, on any device, over the reference attention or the Triton kernels. See `Backend`.

    Args:
        model: loaded.
        device: where it is.
        attention: over a KV cache.
        max_batch_size: sequences of the largest decode that is captured, where the Triton kernels run on a GPU.
    """

    def __init__(
        self,
        model: CausalModel,
        device: torch.device,
        attention: Callable[[KVCache], PagedAttention] = ReferenceAttention,
        max_batch_size: int = 0,
    ) -> None:
        self._max_batch_size = max_batch_size
        self._attention = attention
        self._model = model
        self._device = device
        self._windows = layer_windows(model.config.to_dict())

    @property
    def reserved_bytes(self) -> int:
        """For CUDA graphs, where decodes are captured."""
        return _GRAPH_BYTES if self._device.type == "cuda" and self._max_batch_size else 0

    def block_bytes(self, geometry: KVGeometry) -> int:
        """Keys and values, and nothing else."""
        return geometry.block_bytes

    def on_cache(self, geometry: KVGeometry, num_blocks: int, host_bytes: int = 0) -> StepModel:
        """Allocate a KV cache and attach it to the attention modules."""
        try:
            cache = KVCache(geometry, num_blocks, self._device, host_bytes)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"the KV cache of {num_blocks} blocks could not be allocated: {error}") from None
        attention = self._attention(cache)
        attach(self._model.decoder, attention, self._windows)
        if self._device.type == "cuda" and isinstance(attention, StationaryAttention):
            book = GraphBook(capture_sizes(self._max_batch_size), self.reserved_bytes)
            return GraphedModel(self._model, attention, cache, self._device, book, CudaGraphs(self._device))
        return TransformersModel(self._model, attention, cache, self._device)

    def release_cache(self) -> None:
        """Detach it."""
        attach(self._model.decoder, _NoAttention(), self._windows)


class CpuBackend:
    """A model fused into the C++ kernels. See `Backend`.

    Args:
        model: loaded; its weights move into the kernels' own layout.
        threads: compute threads.
        int8: quantize the weights.
    """

    def __init__(self, model: CausalModel, threads: int, *, int8: bool = False) -> None:
        self._pool = native.ThreadPool(threads)
        self._decoder = FusedDecoder(model, self._pool, int8=int8)
        # What torch still does in a step is small; its threads would only stand in the kernels' way.
        torch.set_num_threads(1)

    @property
    def reserved_bytes(self) -> int:
        """None: nothing is captured."""
        return 0

    def block_bytes(self, geometry: KVGeometry) -> int:
        """Of a cache of one block: only the kernels know how they pad."""
        return CpuAttention(geometry, 1, self._pool).block_bytes

    def on_cache(self, geometry: KVGeometry, num_blocks: int, host_bytes: int = 0) -> StepModel:
        """Allocate a KV cache in the kernels' layout."""
        return FusedModel(self._decoder, CpuAttention(geometry, num_blocks, self._pool, host_bytes))

    def release_cache(self) -> None:
        """Nothing holds on to it but the model that `on_cache` returned."""


class _NoAttention:
    """Stands in between two caches."""

    def plan(self, *_: object) -> None:
        raise AssertionError("no KV cache is in place")

    def forward(self, *_: object) -> torch.Tensor:
        raise AssertionError("no KV cache is in place")


def triton_attention(longest: int) -> Callable[[KVCache], PagedAttention]:
    """Makes attention by the Triton kernels, for sequences of at most `longest` tokens."""
    # Imported where it is chosen: only builds of torch for CUDA bring Triton along.
    module = importlib.import_module("paceline_server.model.attention.triton")
    return lambda cache: module.TritonAttention(cache, longest)


def choose_backend(
    engine: EngineConfig, config: Any, dtype: torch.dtype, device: torch.device, *, int8_cache: bool = False
) -> str:
    """The back end for engine.attention_backend: `cpu`, `triton` or `reference`.

    auto takes cpu on a CPU and triton on a GPU where they can, and says why where they cannot.

    Args:
        engine: of the configuration.
        int8_cache: the KV cache is to hold int8.
        config: transformers' configuration of the model.
        dtype: of the weights.
        device: where they go.

    Raises:
        InvalidConfiguration: what is asked for does not go with the model, the number format or the device.
        NativeUnavailable: the CPU kernels are asked for, and they are not compiled and cannot be.
    """
    wanted = engine.attention_backend
    for key, int8 in (("engine.quantization", engine.quantization is not None), ("kv_cache.dtype", int8_cache)):
        if int8 and wanted in ("reference", "triton"):
            raise InvalidConfiguration(f"{key}: int8 is not done by engine.attention_backend {wanted}; leave it out")
        if int8:
            _require_kernels(f"{key}: int8", config, dtype, device)
            wanted = "cpu"
    if wanted == "cpu":
        _require_kernels("engine.attention_backend: cpu", config, dtype, device)
    elif wanted == "triton" and (obstacle := _triton_obstacle(device)) is not None:
        raise InvalidConfiguration(f"engine.attention_backend: triton {obstacle}")
    return _best_backend(config, dtype, device) if wanted == "auto" else wanted


def _require_kernels(asked: str, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    if (obstacle := _obstacle(config, dtype, device)) is not None:
        raise InvalidConfiguration(f"{asked} {obstacle}")
    native.library()


def _best_backend(config: Any, dtype: torch.dtype, device: torch.device) -> str:
    best = "cpu" if device.type == "cpu" else "triton"
    obstacle = _obstacle(config, dtype, device) if best == "cpu" else _triton_obstacle(device)
    if obstacle is None and best == "cpu":
        try:
            native.library()
        except NativeUnavailable as error:
            obstacle = f"cannot be had: {error}"
    if obstacle is None:
        return best
    log.warning("serving with the slower reference back end: attention_backend %s %s", best, obstacle)
    return "reference"


def _triton_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs engine.device cuda, not {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which builds of torch for CUDA bring along"
    return None


def _obstacle(config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"needs engine.device cpu, not {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"needs engine.dtype float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    return obstacle_to_fusing(config)
