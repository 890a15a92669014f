"""The memory of the KV cache: how many blocks fit, and what every layout of them does. Called by `startup.load`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline_server.engine.batch import BlockCopy
from paceline_server.errors import OutOfMemory
from paceline_server.model.formats import ITEM_BYTES

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of the cache of one model.

    Attributes:
        layers: attention layers.
        kv_heads: key/value heads of a layer, K.
        head_dim: size of a head, D.
        block_size: tokens in a block.
        dtype: of keys and values, see `formats`; int8 has a float32 scale for each key and each value.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers; a back end's layout may add padding."""
        scale = 4 if self.dtype == "int8" else 0
        return 2 * self.layers * self.block_size * self.kv_heads * (self.head_dim * ITEM_BYTES[self.dtype] + scale)


class BlockStorage(Protocol):
    """Blocks of the device, and slots of host memory of the same size. Each attention back end has its own layout."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layout."""
        ...

    @property
    def host(self) -> NDArray[np.uint8]:
        """The slots, [slots, block_bytes]."""
        ...

    def move(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks, one after the other, before anything that is computed later."""
        ...


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
