"""The memory of the KV cache: how many blocks fit, and the tensors themselves. Called by `startup.load`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline_server.engine.batch import BlockCopy, CopyKind
from paceline_server.errors import OutOfMemory

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of the cache of one model.

    Attributes:
        layers: attention layers.
        kv_heads: key/value heads of a layer, K.
        head_dim: size of a head, D.
        block_size: tokens in a block.
        dtype: of keys and values; int8 has a float32 scale for each key and each value.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers; a back end's layout may add padding."""
        scale = 4 if self.dtype == torch.int8 else 0
        return 2 * self.layers * self.block_size * self.kv_heads * (self.head_dim * self.dtype.itemsize + scale)


class BlockStorage(Protocol):
    """Blocks of the device, and slots of host memory of the same size. Each attention back end has its own layout."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layout."""
        ...

    @property
    def host(self) -> Tensor:
        """The slots, [slots, block_bytes] uint8."""
        ...

    def move(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks, one after the other, before anything that is computed later."""
        ...


class KVCache:
    """Keys and values of all layers: [layers, blocks, block_size, 2, K, D]. Implements `BlockStorage`.

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
        shape = (geometry.layers, num_blocks, geometry.block_size, 2, geometry.kv_heads, geometry.head_dim)
        # Zeros, not garbage: a padded gather reads slots that were never written, and 0 * NaN is NaN. Writing the
        # zeros also claims the memory now, when its lack is a refusal with a name, not a kill in mid-stream.
        self.layers = torch.zeros(shape, dtype=geometry.dtype, device=device)
        slots = (host_bytes // geometry.block_bytes, geometry.layers, *shape[2:])
        self._slots = torch.zeros(slots, dtype=geometry.dtype, pin_memory=device.type == "cuda")

    @property
    def host(self) -> Tensor:
        """The slots, [slots, block_bytes] uint8."""
        return self._slots.view(torch.uint8).view(len(self._slots), self.block_bytes)

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


def blocks_for_cpu(block_bytes: int, memory_gb: float, available: int) -> int:
    """Blocks that the configured memory holds.

    Args:
        block_bytes: of one block, as the back end lays it out.
        memory_gb: kv_cache.cpu_memory_gb, in GiB.
        available: bytes that this machine can still give.

    Raises:
        OutOfMemory: the machine has less than that, or not even one block fits.
    """
    wanted = int(memory_gb * GIB)
    if wanted > available:
        raise OutOfMemory(
            f"the KV cache is to have {memory_gb:g} GiB (kv_cache.cpu_memory_gb), but only {available / GIB:.2f} GiB "
            "are free; give less, or raise the memory limit"
        )
    if wanted < block_bytes:
        raise OutOfMemory(
            f"kv_cache.cpu_memory_gb {memory_gb:g} does not hold one block ({block_bytes / GIB:.4f} GiB); "
            "give more, or lower kv_cache.block_size_tokens"
        )
    return wanted // block_bytes


def blocks_for_gpu(block_bytes: int, fraction: float, total: int, used: int, activations: int, graphs: int = 0) -> int:
    """Blocks that are left of a GPU.

    Args:
        block_bytes: of one block, as the back end lays it out.
        fraction: kv_cache.gpu_memory_fraction.
        total: bytes of the GPU.
        used: bytes that are taken, by the weights and by others.
        activations: bytes that a step of the largest size needs beside that, as measured.
        graphs: bytes that captured steps are going to hold.

    Raises:
        OutOfMemory: not even one block fits.
    """
    left = int(total * fraction) - used - activations - graphs
    if left < block_bytes:
        raise OutOfMemory(
            f"nothing is left for the KV cache: of {total / GIB:.1f} GiB, kv_cache.gpu_memory_fraction {fraction:g} "
            f"allows {total * fraction / GIB:.1f}, weights and other users take {used / GIB:.1f}, a step "
            f"{activations / GIB:.1f} and CUDA graphs {graphs / GIB:.1f}; "
            "raise the fraction, lower batching.max_tokens_in_batch or take a larger GPU"
        )
    return left // block_bytes


def host_bytes_for(swap_space_gb: float, host_memory_gb: float, available: int) -> int:
    """Bytes of host memory that slots may take.

    Args:
        swap_space_gb: kv_cache.swap_space_gb, in GiB.
        host_memory_gb: kv_cache.offload.host_memory_gb, in GiB.
        available: bytes that this machine can still give.

    Raises:
        OutOfMemory: the machine has less than that.
    """
    wanted = int((swap_space_gb + host_memory_gb) * GIB)
    if wanted > max(available, 0):
        raise OutOfMemory(
            f"{wanted / GIB:.2f} GiB of host memory are to hold KV blocks (kv_cache.swap_space_gb and "
            "kv_cache.offload.host_memory_gb), but only "
            f"{max(available, 0) / GIB:.2f} GiB are free; give less, or raise the memory limit"
        )
    return wanted
