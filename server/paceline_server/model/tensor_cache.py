"""The KV cache as a tensor, on any device, for models that run in torch. `transformers_backend` makes it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline_server.engine.batch import BlockCopy, CopyKind
from paceline_server.model.cache import KVGeometry


class KVCache:
    """Keys and values of all layers: [layers, blocks, block_size, 2, K, D]. Implements `cache.BlockStorage`.

    One token's keys and values of a layer lie side by side, so that a token is written and a block is gathered by one
    copy each. A slot of host memory holds [layers, block_size, 2, K, D]; beside a GPU it is pinned, so that copies go
    by themselves in the order of the device's stream.

    Args:
        host_bytes: of host memory for slots; what does not make a whole one stays unused.
    """

    def __init__(self, geometry: KVGeometry, num_blocks: int, device: torch.device, host_bytes: int = 0) -> None:
        self.block_bytes = geometry.block_bytes
        self.kv_heads = geometry.kv_heads
        self.block_size = geometry.block_size
        self.block_elements = 2 * geometry.block_size * geometry.kv_heads * geometry.head_dim
        dtype = getattr(torch, geometry.dtype)
        shape = (geometry.layers, num_blocks, geometry.block_size, 2, geometry.kv_heads, geometry.head_dim)
        # Zeros, not garbage: a padded gather reads slots that were never written, and 0 * NaN is NaN. Writing the
        # zeros also claims the memory now, when its lack is a refusal with a name, not a kill in mid-stream.
        self.layers = torch.zeros(shape, dtype=dtype, device=device)
        slots = (host_bytes // geometry.block_bytes, geometry.layers, *shape[2:])
        self._slots = torch.zeros(slots, dtype=dtype, pin_memory=device.type == "cuda")

    @property
    def host(self) -> NDArray[np.uint8]:
        """The slots, [slots, block_bytes]."""
        bytes_each: NDArray[np.uint8] = self._slots.view(torch.uint8).view(len(self._slots), self.block_bytes).numpy()
        return bytes_each

    def move(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks, one after the other."""
        touches_host = False
        for copy in copies:
            source = self._slots[copy.source] if copy.kind is CopyKind.IN else self.layers[:, copy.source]
            target = self._slots[copy.target] if copy.kind is CopyKind.OUT else self.layers[:, copy.target]
            target.copy_(source, non_blocking=True)
            touches_host = touches_host or copy.kind is not CopyKind.WITHIN
        if touches_host and self.layers.is_cuda:
            torch.cuda.current_stream().synchronize()  # slots are read and filled outside the stream

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store T tokens: slots [T], key and value [T, K, D]."""
        target = self.layers[layer].view(-1, 2, self.kv_heads, key.shape[-1])
        target.index_copy_(0, slots, torch.stack((key, value), dim=1))

    def gather(self, layer: int, blocks: Tensor, count: int, out: Tensor) -> tuple[Tensor, Tensor]:
        """Copy `count` equally long runs of blocks into `out`; returns its keys and values, [count, K, L, D] each."""
        source = self.layers[layer]
        torch.index_select(source.view(source.shape[0], -1), 0, blocks, out=out.view(len(blocks), -1))
        gathered = out.view(count, -1, 2, self.kv_heads, source.shape[-1])  # [count, L, 2, K, D]
        return gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
