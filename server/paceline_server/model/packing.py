"""A step's slices as flat arrays, which is how the model sees them: all tokens of the step in one row.

Pure numpy and one pass over the slices, none over the tokens. `runner` packs a batch once a step; the attention back
end plans from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_server.engine.batch import SamplingParams, StepBatch

Ints = NDArray[np.int64]

COLDEST = 1e-5
"""A temperature below this one is greedy: the quotient would overflow."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """S slices of T tokens in all, R of them sampled; the order is the batch's.

    Attributes:
        token_ids: [T].
        positions: [T] place of each token in its own sequence.
        slots: [T] where each token's keys and values go: block * block_size + offset.
        query_starts: [S + 1] first row of each slice; the last entry is T.
        kv_lengths: [S] tokens that the slice's last token attends to: all before it and itself.
        deterministic: [S] 1 where a slice's results must not depend on the others, else 0.
        block_table: [S, B] physical blocks of each slice, B those of the longest; padded with 0.
        sampled: [R] slices whose next token is drawn.
        logits_rows: [R] their last rows, ascending.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    query_starts: Ints
    kv_lengths: Ints
    deterministic: Ints
    block_table: Ints
    sampled: Ints
    logits_rows: Ints

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def query_lengths(self) -> Ints:
        """[S] tokens of each slice."""
        return np.diff(self.query_starts)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the tokens of R rows are drawn, as arrays.

    Attributes:
        seeds: [R] uint64, keys of the rows' random streams.
        positions: [R] position of the token that is drawn.
        banned: (row, token id) pairs that are never drawn, as two arrays.
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: Ints
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: Ints
    banned: tuple[Ints, Ints]


def pack(batch: StepBatch, block_size: int) -> PackedBatch:
    """Lay a batch out in one row.

    The block tables of the slices may be longer than their tokens need; the rest is cut off.
    """
    slices = batch.slices
    query_lengths = _ints(len(piece.token_ids) for piece in slices)
    starts = _ints(piece.start for piece in slices)
    kv_lengths = starts + query_lengths
    query_starts = np.concatenate(([0], np.cumsum(query_lengths)))
    blocks = -(-kv_lengths // block_size)
    block_table = np.zeros((len(slices), int(blocks.max())), dtype=np.int64)
    for row, piece in enumerate(slices):
        block_table[row, : blocks[row]] = piece.block_table[: blocks[row]]
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], query_lengths)
    owner = np.repeat(np.arange(len(slices)), query_lengths)
    sampled = _ints(row for row, piece in enumerate(slices) if piece.sampling is not None)
    return PackedBatch(
        token_ids=_ints(chain.from_iterable(piece.token_ids for piece in slices)),
        positions=positions,
        slots=block_table[owner, positions // block_size] * block_size + positions % block_size,
        query_starts=query_starts,
        kv_lengths=kv_lengths,
        deterministic=_ints(piece.deterministic for piece in slices),
        block_table=block_table,
        sampled=sampled,
        logits_rows=query_starts[sampled + 1] - 1,
    )


def pack_sampling(batch: StepBatch) -> SamplingBatch:
    """The sampling settings of the slices that are sampled, in their order."""
    drawn = [piece for piece in batch.slices if piece.sampling is not None]
    settings = [piece.sampling or SamplingParams() for piece in drawn]
    return SamplingBatch(
        temperature=_floats(params.temperature for params in settings),
        top_p=_floats(params.top_p for params in settings),
        top_k=_ints(params.top_k for params in settings),
        min_p=_floats(params.min_p for params in settings),
        seeds=np.array([params.seed & 0xFFFF_FFFF_FFFF_FFFF for params in settings], dtype=np.uint64),
        positions=_ints(piece.start + len(piece.token_ids) for piece in drawn),
        banned=(
            np.repeat(np.arange(len(drawn)), [len(piece.banned_token_ids) for piece in drawn]),
            _ints(chain.from_iterable(piece.banned_token_ids for piece in drawn)),
        ),
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _floats(values: Iterable[Any]) -> NDArray[np.float32]:
    return np.fromiter(values, dtype=np.float32)
