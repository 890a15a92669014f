"""Paged attention in plain torch: the oracle of the tests, and the back end wherever no other one runs.

Blocks are gathered into a dense, padded tensor and handed to torch's scaled dot product attention, which keeps scores
and softmax in float32. Rows with one new token are attended to together, in groups of similar length; longer slices
one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline_server.model.cache import KVCache
from paceline_server.model.packing import Ints, PackedBatch

_LENGTH_RATIO = 1.5
"""Rows share a group while the longest has at most so many times the KV of the shortest: padding costs memory traffic,
and a further group costs a few calls a layer."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """N slices of one token each.

    Attributes:
        rows: [N] packed rows.
        blocks: [N * B] physical blocks, padded to B a row.
        mask: [N, 1, 1, B * block_size], True where there is a key to attend to.
    """

    rows: Tensor
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One slice of n tokens at the end of L.

    Attributes:
        begin, end: packed rows.
        blocks: [B] physical blocks, or None where the slice starts the sequence: all keys are at hand then.
        mask: [n, L], True where a row may attend; None together with `blocks`.
    """

    begin: int
    end: int
    length: int
    blocks: Tensor | None
    mask: Tensor | None


class ReferenceAttention:
    """See `interface.PagedAttention`."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._slots = torch.empty(0, dtype=torch.int64)
        self._decodes: list[_Decodes] = []
        self._prefills: list[_Prefill] = []
        # Gathered keys and values. Kept from call to call: fresh memory of this size would be page faults every layer.
        self._scratch = cache.layers.new_empty(0)

    def plan(self, batch: PackedBatch) -> None:
        """Sort the slices into groups and build their index tensors and masks."""
        lengths = batch.query_lengths
        self._slots = self._tensor(batch.slots)
        self._decodes = [self._plan_decodes(batch, group) for group in _groups(batch.kv_lengths, lengths == 1)]
        self._prefills = [self._plan_prefill(batch, int(index)) for index in np.flatnonzero(lengths > 1)]
        gathered = [len(group.blocks) for group in self._decodes]
        gathered += [len(piece.blocks) for piece in self._prefills if piece.blocks is not None]
        needed = max(gathered, default=0) * self._cache.block_elements
        if self._scratch.numel() < needed:
            self._scratch = self._cache.layers.new_empty(needed)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write, then attend group by group."""
        self._cache.write(layer, self._slots, key, value)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._decodes:
            output[group.rows] = self._decode(layer, query[group.rows], group, scale)
        for piece in self._prefills:
            rows = slice(piece.begin, piece.end)
            output[rows] = self._prefill(layer, query[rows], key[rows], value[rows], piece, scale)
        return output

    def _decode(self, layer: int, query: Tensor, group: _Decodes, scale: float) -> Tensor:
        """[N, H, D]: the query heads that share a key head are the rows of one small attention problem."""
        count, heads, size = query.shape
        keys, values = self._gather(layer, group.blocks, count)
        grouped = query.reshape(count, self._cache.kv_heads, -1, size)  # [N, K, H / K, D]
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=scale)
        return attended.reshape(count, heads, size)

    def _prefill(self, layer: int, query: Tensor, key: Tensor, value: Tensor, piece: _Prefill, scale: float) -> Tensor:
        """[n, H, D]."""
        if piece.blocks is None:
            keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        else:
            keys, values = self._gather(layer, piece.blocks, 1)
            keys, values = keys[:, :, : piece.length], values[:, :, : piece.length]
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=piece.mask,
            is_causal=piece.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def _gather(self, layer: int, blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `count` sequences, [count, K, L, D] each, as views of the scratch memory."""
        gathered = self._scratch[: len(blocks) * self._cache.block_elements]
        return self._cache.gather(layer, blocks, count, gathered)

    def _plan_decodes(self, batch: PackedBatch, group: Ints) -> _Decodes:
        size = self._cache.block_size
        lengths = batch.kv_lengths[group]
        width = -(-int(lengths.max()) // size)
        mask = np.arange(width * size) < lengths[:, None]
        return _Decodes(
            rows=self._tensor(batch.query_starts[group]),
            blocks=self._tensor(batch.block_table[group, :width].reshape(-1)),
            mask=self._tensor(mask)[:, None, None, :],
        )

    def _plan_prefill(self, batch: PackedBatch, index: int) -> _Prefill:
        begin, end = int(batch.query_starts[index]), int(batch.query_starts[index + 1])
        length = int(batch.kv_lengths[index])
        if end - begin == length:
            return _Prefill(begin, end, length, None, None)
        blocks = batch.block_table[index, : -(-length // self._cache.block_size)]
        mask = np.arange(length) <= batch.positions[begin:end, None]
        return _Prefill(begin, end, length, self._tensor(blocks), self._tensor(mask))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._cache.layers.device, non_blocking=True)


def _groups(kv_lengths: Ints, wanted: np.ndarray) -> list[Ints]:
    """Split the wanted slices into groups of similar KV length."""
    order = np.flatnonzero(wanted)
    order = order[np.argsort(kv_lengths[order], kind="stable")]
    groups = []
    while len(order):
        limit = kv_lengths[order[0]] * _LENGTH_RATIO
        count = int(np.searchsorted(kv_lengths[order], limit, side="right"))
        groups.append(order[:count])
        order = order[count:]
    return groups
