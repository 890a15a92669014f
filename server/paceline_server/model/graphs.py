"""CUDA graphs of decode steps: when to capture, when to replay, and when to run as usual.

Launching the kernels of a decode takes longer than running them; a captured step is one launch. A capture holds for one
batch size, so batches are padded to the next captured one. The server does not wait for captures at its start: a step
without one runs eagerly and is remembered, and what was wanted most is captured when nothing is to be done.

`graphed_model` asks `GraphBook` before each decode, and `engine.loop` lets it capture when idle. `GraphDevice` is the
seam to CUDA; its fake is in `model.testing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from paceline_server.model.packing import PackedBatch

Replay = Callable[[], None]
"""Computes a captured step again, from and to the memory that it was captured with."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A step on the device.

    Attributes:
        replay: runs it.
        bytes: of device memory that it holds.
    """

    replay: Replay
    bytes: int


class GraphDevice(Protocol):
    """What captures."""

    def capture(self, step: Callable[[], None]) -> Captured:
        """Run `step` once to warm up and once to capture it.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """
        ...


class CudaGraphs:
    """Captures on a GPU. All captures share one memory pool, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], None]) -> Captured:
        """Warm up on a stream of its own, as capturing demands, then capture."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        left, _ = torch.cuda.mem_get_info(self._device)
        return Captured(graph.replay, max(0, free - left))


def capture_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes that are captured: the small ones tightly, then in steps of 8, so that little is padded."""
    sizes = {1, 2, 4, *range(8, max_batch_size, 8), max_batch_size}
    return tuple(sorted(size for size in sizes if size <= max_batch_size))


class GraphBook:
    """Which sizes are captured, wanted, or given up.

    Args:
        sizes: that may be captured, ascending.
        memory: bytes that captures may hold together.
    """

    def __init__(self, sizes: tuple[int, ...], memory: int) -> None:
        self._sizes = sizes
        self._memory = memory
        self._generation = 0
        self._captured: dict[int, Captured] = {}
        self._wanted: Counter[int] = Counter()
        self._refused: set[int] = set()

    @property
    def held_bytes(self) -> int:
        """Device memory of all captures."""
        return sum(one.bytes for one in self._captured.values())

    def padded(self, batch: PackedBatch) -> int | None:
        """The size that a step is padded to; None for one that no capture can hold: a prefill, or too many rows."""
        if len(batch.logits_rows) != batch.num_tokens or batch.num_tokens != len(batch.kv_lengths):
            return None
        return next((size for size in self._sizes if size >= batch.num_tokens), None)

    def find(self, size: int) -> Replay | None:
        """The capture of a size, or None: run eagerly, and it is remembered that the size was wanted."""
        found = self._captured.get(size)
        if found is None:
            self._wanted[size] += 1
            return None
        return found.replay

    def next_wanted(self) -> int | None:
        """The size to capture now, the most wanted first; None where nothing is wanted or memory is used up."""
        if self.held_bytes >= self._memory:
            return None
        ready = [size for size in self._wanted if size not in self._refused]
        return max(ready, key=lambda size: (self._wanted[size], -size), default=None)

    def keep(self, size: int, captured: Captured, generation: int) -> None:
        """Note a capture. It is void as soon as the memory that it reads has moved: see `expect`."""
        self.expect(generation)
        self._captured[size] = captured
        del self._wanted[size]

    def refuse(self, size: int) -> None:
        """Never try this size again: the device had no room for it."""
        self._refused.add(size)

    def expect(self, generation: int) -> None:
        """Forget captures of another generation of the memory that steps read; they are wanted again."""
        if generation != self._generation:
            self._wanted.update(dict.fromkeys(self._captured, 1))
            self._captured.clear()
            self._generation = generation


def pad_decodes(batch: PackedBatch, size: int) -> PackedBatch:
    """A decode of `size` rows: those of `batch`, and rows that read one key, write nothing, and mean nothing."""
    added = size - batch.num_tokens
    nothing = np.zeros(added, dtype=np.int64)
    return replace(
        batch,
        token_ids=np.concatenate((batch.token_ids, nothing)),
        positions=np.concatenate((batch.positions, nothing)),
        slots=np.concatenate((batch.slots, nothing - 1)),
        query_starts=np.arange(size + 1),
        kv_lengths=np.concatenate((batch.kv_lengths, nothing + 1)),
        deterministic=np.concatenate((batch.deterministic, nothing)),
        block_table=np.pad(batch.block_table, ((0, added), (0, 0))),
        logits_rows=np.arange(size),
    )


def empty_decode() -> PackedBatch:
    """A decode without rows, to be padded to what is captured."""
    none = np.empty(0, dtype=np.int64)
    return PackedBatch(
        token_ids=none,
        positions=none,
        slots=none,
        query_starts=np.zeros(1, dtype=np.int64),
        kv_lengths=none,
        deterministic=none,
        block_table=np.empty((0, 1), dtype=np.int64),
        sampled=none,
        logits_rows=none,
    )
