"""Paged attention on a GPU by our own Triton kernels: prefill chunks and decodes in one launch.

Chosen with an H100 in mind:

- Nothing waits for the device. Tasks are cut on the host (`tasks`), and go over in one small copy a step and window.
- A step with prefill chunks takes tiles of 64 rows, what one warpgroup's matrix instruction takes; one with decodes
  alone takes 16, the least that tensor cores take, because reading keys is what it waits for.
- Tiles of 64 keys: two of them, of 128 elements in bfloat16, fill 64 KiB of shared memory and leave room for the
  pipeline's next ones. float32 halves them.
- A decode's keys are split until every multiprocessor has something to read.

The cache is `cache.KVCache`, the same as the reference's. Without a GPU the kernels run in Triton's interpreter
(TRITON_INTERPRET=1, set before Triton is imported), which is for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import triton
from torch import Tensor

from paceline_server.model.attention import tasks, triton_kernels
from paceline_server.model.attention.interface import ScoreRule
from paceline_server.model.packing import PackedBatch
from paceline_server.model.tensor_cache import KVCache

_DECODE_ROWS = 16
_PREFILL_ROWS = 64
_TILE_BYTES = 128
"""Of one column of a tile of keys: 64 keys of two bytes, 32 of four."""

_INTERPRETED_MULTIPROCESSORS = 8
"""What the interpreter pretends to be: enough that decodes are split."""


def interpreted() -> bool:
    """Whether the kernels run on the CPU, in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


class _Buffers:
    """Memory on the device that keeps its place from step to step, so that a captured step finds it again.

    Attributes:
        generation: grows whenever a buffer had to move; what was captured before is void then.
    """

    def __init__(self, device: torch.device) -> None:
        self.generation = 0
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory, the same as at the last call of this name as far as it suffices."""
        count = prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.numel() < count:
            memory = torch.empty(triton.next_power_of_2(max(count, 1)), dtype=dtype, device=self._device)
            self._memory[name] = memory
            self.generation += 1
        return memory[:count].view(shape)

    def fill(self, name: str, content: Tensor) -> Tensor:
        """A copy of a tensor of the host's. Without waiting, which takes pinned memory."""
        target = self.take(name, tuple(content.shape), content.dtype)
        return target.copy_(content.pin_memory() if self._device.type == "cuda" else content, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Tasks on the device, for the layers of one window; `parts` holds the unfinished results of one layer."""

    tasks: Tensor
    merges: Tensor
    splits: int
    parts: Tensor


class TritonAttention:
    """See `interface.PagedAttention`.

    Args:
        cache: on the device.
        longest: tokens of the longest sequence.
    """

    def __init__(self, cache: KVCache, longest: int) -> None:
        self._cache = cache
        self._table_width = -(-longest // cache.block_size)
        device = cache.layers.device
        self._buffers = _Buffers(device)
        self._multiprocessors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else _INTERPRETED_MULTIPROCESSORS
        )
        self._batch: PackedBatch | None = None
        self._slots = self._table = torch.empty(0, dtype=torch.int64, device=device)
        self._plans: dict[int | None, _Plan] = {}
        self._kinds: list[tuple[int | None, int, int]] = []  # window, heads and head size of the layers seen so far

    @property
    def generation(self) -> int:
        """Grows when the memory that a captured step reads has moved."""
        return self._buffers.generation

    def plan(self, batch: PackedBatch) -> None:
        """Copy the step to the device; tasks for windows that no step had before are made when `forward` asks."""
        self._batch = batch
        self._slots = self._buffers.fill("slots", torch.from_numpy(batch.slots))
        table = np.zeros((len(batch.block_table), self._table_width), dtype=np.int32)
        table[:, : batch.block_table.shape[1]] = batch.block_table
        self._table = self._buffers.fill("table", torch.from_numpy(table))
        self._plans = {}
        for window, heads, head in self._kinds:
            self._plans[window] = self._cut(window, heads, head)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """Write, attend, and merge what was split."""
        heads, head = query.shape[1:]
        group = heads // self._cache.kv_heads
        if rule.window not in self._plans:
            self._kinds.append((rule.window, heads, head))
            self._plans[rule.window] = self._cut(*self._kinds[-1])
        plan = self._plans[rule.window]
        cache = self._cache.layers[layer]
        self._write(cache, key, value)
        query, output = _packed_heads(query), torch.empty(query.shape, dtype=query.dtype, device=query.device)
        padded = max(16, triton.next_power_of_2(head))
        triton_kernels.attend[(len(plan.tasks), self._cache.kv_heads)](
            query,
            cache,
            self._table,
            plan.tasks,
            output,
            plan.parts,
            rule.scale,
            query.stride(0),
            self._table.stride(0),
            KV_HEADS=self._cache.kv_heads,
            GROUP=group,
            HEAD=head,
            HEAD_PADDED=padded,
            BLOCK=self._cache.block_size,
            ROWS=self._rows(group),
            KEYS=_TILE_BYTES // cache.element_size(),
            WINDOW=rule.window or 0,
            SOFTCAP=rule.softcap or 0.0,
            WIDEN=interpreted() and query.dtype == torch.bfloat16,
        )
        if len(plan.merges):
            triton_kernels.merge[(len(plan.merges), heads)](
                output,
                plan.parts,
                plan.merges,
                HEADS=heads,
                HEAD=head,
                HEAD_PADDED=padded,
                SPLITS=plan.splits,
                SPLITS_PADDED=triton.next_power_of_2(plan.splits),
            )
        return output

    def _write(self, cache: Tensor, key: Tensor, value: Tensor) -> None:
        key, value = _packed_heads(key), _packed_heads(value)
        width = key.shape[1] * key.shape[2]
        triton_kernels.write[(len(key),)](
            cache,
            self._slots,
            key,
            value,
            key.stride(0),
            value.stride(0),
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
        )

    def _rows(self, group: int) -> int:
        """Rows of a tile: tokens times the heads of a group."""
        assert self._batch is not None, "plan comes before forward"
        least = triton.next_power_of_2(group)
        prefills = bool((self._batch.query_lengths > 1).any())
        return int(max(least, _PREFILL_ROWS if prefills else _DECODE_ROWS))

    def _cut(self, window: int | None, heads: int, head: int) -> _Plan:
        batch = self._batch
        assert batch is not None, "plan comes before forward"
        decodes = int((batch.query_lengths == 1).sum())
        splits = tasks.splits_for(decodes, self._cache.kv_heads, self._multiprocessors)
        group = heads // self._cache.kv_heads
        table = tasks.cut(batch, self._rows(group) // group, splits, window)
        return _Plan(
            self._buffers.fill(f"tasks {window}", torch.from_numpy(table.tasks)),
            self._buffers.fill(f"merges {window}", torch.from_numpy(table.merges)),
            table.splits,
            self._buffers.take("parts", (len(table.merges) * table.splits, heads, head + 2), torch.float32),
        )


def _packed_heads(tensor: Tensor) -> Tensor:
    """[T, heads, head] whose heads lie side by side; rows may be apart, as slices of a joined projection are."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()
