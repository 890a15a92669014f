"""How a step's attention is cut into tasks for a GPU: pure numpy, decided on the host from what the host knows anyway.

`triton` plans with it. A task is a tile of rows (neighbouring tokens times the query heads of one key head) over a
range of keys. A decode is one group of rows, so a few long sequences would occupy a few multiprocessors: its keys are
split between several tasks, and a second kernel merges what they gathered (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline_server.model.packing import PackedBatch

MOST_SPLITS = 16
"""Parts of a decode at most: the merge reads them all."""


@dataclass(frozen=True, slots=True)
class TaskTable:
    """Tasks and merges of a step, for the layers of one window.

    Attributes:
        tasks: [N, 7] int32: slice, first packed row, rows, position of the first row, begin and end of its keys, and
            the place of its unfinished result, or -1 where it finishes by itself.
        merges: [M, 2] int32: packed row, and the place of its first part; the others follow.
        splits: parts of every merge.
    """

    tasks: NDArray[np.int32]
    merges: NDArray[np.int32]
    splits: int


def splits_for(decodes: int, kv_heads: int, multiprocessors: int) -> int:
    """Parts of each decode: as many as give every multiprocessor work.

    Lengths do not count, so that a captured step (`model.graphs`) fits whatever lengths its sequences grow to.
    """
    return max(1, min(-(-multiprocessors // max(1, decodes * kv_heads)), MOST_SPLITS))


def cut(batch: PackedBatch, rows_at_once: int, splits: int, window: int | None) -> TaskTable:
    """Cut a step.

    Args:
        batch: packed.
        rows_at_once: tokens of a task at most.
        splits: parts of each slice of one token.
        window: keys that a row sees at most, or None.
    """
    lengths = batch.query_lengths
    tiles = -(-lengths // rows_at_once)
    owner = np.repeat(np.arange(len(lengths)), tiles)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * rows_at_once
    rows = np.minimum(rows_at_once, lengths[owner] - offset)
    position = batch.kv_lengths[owner] - lengths[owner] + offset
    end = position + rows
    begin = np.maximum(0, position + 1 - window) if window else np.zeros_like(end)
    table = np.stack((owner, batch.query_starts[owner] + offset, rows, position, begin, end, np.full_like(end, -1)), 1)
    decodes = np.flatnonzero(lengths[owner] == 1) if splits > 1 else np.empty(0, dtype=np.int64)
    whole = np.delete(table, decodes, axis=0)
    split = _split(table[decodes], splits)
    merges = np.stack((table[decodes, 1], np.arange(len(decodes)) * splits), 1)
    return TaskTable(np.concatenate((whole, split)).astype(np.int32), merges.astype(np.int32), splits)


def _split(decodes: NDArray[np.int64], splits: int) -> NDArray[np.int64]:
    """Each decode's keys in `splits` ranges, some of which may be empty."""
    parts = np.repeat(decodes, splits, axis=0)
    number = np.tile(np.arange(splits), len(decodes))
    begin, keys = parts[:, 4].copy(), parts[:, 5] - parts[:, 4]
    parts[:, 4], parts[:, 5] = begin + keys * number // splits, begin + keys * (number + 1) // splits
    parts[:, 6] = np.arange(len(parts))
    return parts
