"""A model as transformers runs it, over the reference attention or the Triton kernels. The home of torch in a start.

`startup` imports it where the CPU kernels do not compute.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import torch

from paceline_server.config import ServerConfig
from paceline_server.errors import OutOfMemory
from paceline_server.model.attention.hook import attach
from paceline_server.model.attention.interface import PagedAttention
from paceline_server.model.attention.reference import ReferenceAttention
from paceline_server.model.cache import KVGeometry
from paceline_server.model.graphed_model import GraphedModel, StationaryAttention
from paceline_server.model.graphs import CudaGraphs, GraphBook, capture_sizes
from paceline_server.model.loader import CausalModel, load_model, read_config
from paceline_server.model.machine import cores_given
from paceline_server.model.runner import StepModel
from paceline_server.model.support import layer_windows
from paceline_server.model.tensor_cache import KVCache
from paceline_server.model.transformers_model import TransformersModel

_GRAPH_BYTES = 1 << 30
"""Device memory that captured steps may hold. They are captured later: the KV cache leaves it free."""


def load(
    folder: Path, name: str, dtype: str, device: str, available: int, longest: int, config: ServerConfig
) -> TransformersBackend:
    """Read the weights.

    Args:
        folder: the model's.
        name: of the back end, reference or triton.
        dtype: of the weights in memory.
        device: where they go.
        available: bytes of memory that may be taken on a CPU.
        longest: tokens of the longest sequence.
        config: of the whole server.

    Raises:
        OutOfMemory: the weights do not fit.
        ModelNotFound: a file is damaged.
        ModelUnsupported: files and configuration do not go together.
    """
    if device == "cpu":
        torch.set_num_threads(config.engine.threads or cores_given())
    place = torch.device(device)
    model = load_model(folder, read_config(folder), getattr(torch, dtype), place, available)
    if name == "triton":
        return TransformersBackend(model, place, triton_attention(longest), config.batching.max_batch_size)
    return TransformersBackend(model, place)


class TransformersBackend:
    """A model of transformers, on any device, over the reference attention or the Triton kernels. See `Backend`.

    Args:
        model: loaded.
        device: where it is.
        attention: over a KV cache.
        max_batch_size: sequences of the largest decode that is captured, where the Triton kernels run on a GPU.
    """

    out_of_memory: tuple[type[Exception], ...] = (torch.OutOfMemoryError,)

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
