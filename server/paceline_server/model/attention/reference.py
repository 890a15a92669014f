"""Paged attention in plain torch: the oracle of the tests, and the back end wherever no other one runs.

Blocks are gathered into a dense, padded tensor and handed to torch's scaled dot product attention, which keeps scores
and softmax in float32. Rows with one new token are attended to together, in groups of similar length; longer slices
one by one. Layers with a sliding window have a plan of their own, which gathers no block that the window has left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline_server.model.attention.interface import ScoreRule
from paceline_server.model.packing import Ints, PackedBatch
from paceline_server.model.tensor_cache import KVCache

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
    """One slice of n tokens that sees L keys.

    Attributes:
        begin, end: packed rows.
        length: L.
        blocks: [B] physical blocks, or None where the slice starts the sequence: all keys are at hand then.
        mask: [n, L], True where a row may attend; None where `blocks` is and the order of the rows says everything.
    """

    begin: int
    end: int
    length: int
    blocks: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    decodes: list[_Decodes]
    prefills: list[_Prefill]

    @property
    def most_blocks(self) -> int:
        """Blocks that the largest group gathers."""
        gathered = [len(group.blocks) for group in self.decodes]
        gathered += [len(piece.blocks) for piece in self.prefills if piece.blocks is not None]
        return max(gathered, default=0)


class ReferenceAttention:
    """See `interface.PagedAttention`."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._batch: PackedBatch | None = None
        self._slots = torch.empty(0, dtype=torch.int64)
        self._plans: dict[int | None, _Plan] = {}  # by window, each made when its first layer asks
        # Gathered keys and values. Kept from call to call: fresh memory of this size would be page faults every layer.
        self._scratch = cache.layers.new_empty(0)

    def plan(self, batch: PackedBatch) -> None:
        """Take note of the step; index tensors and masks depend on the layers' windows, which `forward` knows."""
        self._batch = batch
        self._slots = self._tensor(batch.slots)
        self._plans = {}

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """Write, then attend group by group."""
        plan = self._plan(rule.window)
        self._cache.write(layer, self._slots, key, value)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in plan.decodes:
            output[group.rows] = self._decode(layer, query[group.rows], group, rule)
        for piece in plan.prefills:
            rows = slice(piece.begin, piece.end)
            output[rows] = self._prefill(layer, query[rows], key[rows], value[rows], piece, rule)
        return output

    def _decode(self, layer: int, query: Tensor, group: _Decodes, rule: ScoreRule) -> Tensor:
        """[N, H, D]: the query heads that share a key head are the rows of one small attention problem."""
        count, heads, size = query.shape
        keys, values = self._gather(layer, group.blocks, count)
        grouped = query.reshape(count, self._cache.kv_heads, -1, size)  # [N, K, H / K, D]
        return _attend(grouped, keys, values, group.mask, rule).reshape(count, heads, size)

    def _prefill(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, piece: _Prefill, rule: ScoreRule
    ) -> Tensor:
        """[n, H, D]."""
        if piece.blocks is None:
            keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        else:
            keys, values = self._gather(layer, piece.blocks, 1)
            keys, values = keys[:, :, : piece.length], values[:, :, : piece.length]
        return _attend(query.transpose(0, 1)[None], keys, values, piece.mask, rule)[0].transpose(0, 1)

    def _gather(self, layer: int, blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `count` sequences, [count, K, L, D] each, as views of the scratch memory."""
        gathered = self._scratch[: len(blocks) * self._cache.block_elements]
        return self._cache.gather(layer, blocks, count, gathered)

    def _plan(self, window: int | None) -> _Plan:
        """The step's plan for the layers with this window."""
        if window not in self._plans:
            batch = self._batch
            assert batch is not None, "plan comes before forward"
            lengths = batch.query_lengths
            seen = np.minimum(batch.kv_lengths, window or batch.kv_lengths)
            plan = _Plan(
                [self._plan_decodes(batch, group, window) for group in _groups(seen, lengths == 1)],
                [self._plan_prefill(batch, int(index), window) for index in np.flatnonzero(lengths > 1)],
            )
            needed = plan.most_blocks * self._cache.block_elements
            if self._scratch.numel() < needed:
                self._scratch = self._cache.layers.new_empty(needed)
            self._plans[window] = plan
        return self._plans[window]

    def _plan_decodes(self, batch: PackedBatch, group: Ints, window: int | None) -> _Decodes:
        size = self._cache.block_size
        lengths = batch.kv_lengths[group, None]  # [N, 1]
        oldest = np.maximum(lengths - (window or lengths), 0)  # first key that is seen
        first = oldest // size
        width = int((-(-lengths // size) - first).max())
        columns = np.minimum(first + np.arange(width), batch.block_table.shape[1] - 1)
        keys = first * size + np.arange(width * size)
        return _Decodes(
            rows=self._tensor(batch.query_starts[group]),
            blocks=self._tensor(batch.block_table[group[:, None], columns].reshape(-1)),
            mask=self._tensor((keys < lengths) & (keys >= oldest))[:, None, None, :],
        )

    def _plan_prefill(self, batch: PackedBatch, index: int, window: int | None) -> _Prefill:
        begin, end = int(batch.query_starts[index]), int(batch.query_starts[index + 1])
        length, size = int(batch.kv_lengths[index]), self._cache.block_size
        whole = end - begin == length
        if whole and (window is None or window >= length):
            return _Prefill(begin, end, length, None, None)
        positions = batch.positions[begin:end, None]
        first = 0 if whole or window is None else max(0, int(positions[0, 0]) - window + 1) // size
        keys = np.arange(first * size, length)
        mask = (keys <= positions) & (keys > positions - (window or length))
        blocks = None if whole else self._tensor(batch.block_table[index, first : -(-length // size)])
        return _Prefill(begin, end, len(keys), blocks, self._tensor(mask))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._cache.layers.device, non_blocking=True)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: ScoreRule) -> Tensor:
    """Query [N, H, n, D], keys and values [N, K, L, D], to [N, H, n, D]; without a mask, row i sees keys 0 to i."""
    if rule.softcap is None:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=rule.scale, enable_gqa=True
        )
    if mask is None:
        mask = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
    repeated = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(repeated, dim=1) for part in (keys, values))
    scores = query.float() @ keys.transpose(-1, -2) * rule.scale
    scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return (weights @ values).to(query.dtype)


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
