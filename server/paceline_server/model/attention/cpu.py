"""Paged attention on a CPU by the C++ kernels, which own the cache's layout.

`fused_decoder` uses the cache and the plan, and attends without coming back to Python.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline_server.engine.batch import BlockCopy, CopyKind
from paceline_server.model.cache import KVGeometry
from paceline_server.model.native import CacheShape, StepShape, ThreadPool, address
from paceline_server.model.packing import PackedBatch

_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}


class CpuAttention:
    """Implements `cache.BlockStorage`, and plans a step.

    Args:
        geometry: of the cache, float32, bfloat16 or int8.
        num_blocks: in the cache.
        pool: computes.
        host_bytes: of host memory for slots.

    Raises:
        OutOfMemory: the cache does not fit.
    """

    def __init__(self, geometry: KVGeometry, num_blocks: int, pool: ThreadPool, host_bytes: int = 0) -> None:
        self._pool = pool
        shape = CacheShape(
            layers=geometry.layers,
            blocks=num_blocks,
            block_size=geometry.block_size,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            format=_FORMATS[geometry.dtype],
        )
        self.handle = pool.library.make("attention", pool.handle.address, shape)
        self.block_bytes = int(pool.library.call("attention_block_bytes", self.handle.address))
        self.host = np.empty((host_bytes // self.block_bytes, self.block_bytes), dtype=np.uint8)
        self.host.fill(0)  # claims the memory now, when its lack is a refusal with a name
        self.step = StepShape()
        self._batch: PackedBatch | None = None  # keeps alive what `step` points at

    def move(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks, one after the other."""
        library, cache, slots = self._pool.library, self.handle.address, self.host.ctypes.data
        for copy in copies:
            if copy.kind is CopyKind.WITHIN:
                library.call("attention_copy_block", cache, copy.source, copy.target)
            elif copy.kind is CopyKind.OUT:
                library.call("attention_save_block", cache, copy.source, slots + copy.target * self.block_bytes)
            else:
                library.call("attention_load_block", cache, slots + copy.source * self.block_bytes, copy.target)

    def plan(self, batch: PackedBatch) -> None:
        """Take note of the step."""
        self._batch = batch
        self.step = StepShape(
            tokens=batch.num_tokens,
            sequences=len(batch.kv_lengths),
            table_width=batch.block_table.shape[1],
            slots=address(batch.slots),
            query_starts=address(batch.query_starts),
            kv_lengths=address(batch.kv_lengths),
            deterministic=address(batch.deterministic),
            block_table=address(batch.block_table),
        )
