"""Packing: one flat row of tokens, and where each token's keys and values go."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.model.packing import pack, pack_sampling


@st.composite
def batches(draw: st.DrawFn) -> tuple[StepBatch, int]:
    block_size = draw(st.integers(1, 20))
    slices = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 50))
        count = draw(st.integers(1, 30))
        spare = draw(st.integers(0, 3))
        blocks = -(-(start + count) // block_size) + spare
        slices.append(
            SequenceSlice(
                token_ids=draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)),
                start=start,
                block_table=draw(st.lists(st.integers(0, 500), min_size=blocks, max_size=blocks)),
                sampling=draw(st.sampled_from([None, SamplingParams(seed=3)])),
                banned_token_ids=draw(st.lists(st.integers(0, 99), max_size=3)),
            )
        )
    return StepBatch(slices), block_size


@given(batches())
def test_every_token_is_packed_as_a_loop_over_the_slices_would(case: tuple[StepBatch, int]) -> None:
    batch, block_size = case
    packed = pack(batch, block_size)
    row = 0
    for index, piece in enumerate(batch.slices):
        assert packed.query_starts[index] == row
        assert packed.kv_lengths[index] == piece.start + len(piece.token_ids)
        for offset, token in enumerate(piece.token_ids):
            position = piece.start + offset
            assert packed.token_ids[row] == token
            assert packed.positions[row] == position
            block = piece.block_table[position // block_size]
            assert packed.slots[row] == block * block_size + position % block_size
            row += 1
        used = -(-packed.kv_lengths[index] // block_size)
        assert packed.block_table[index, :used].tolist() == list(piece.block_table[:used])
        assert not packed.block_table[index, used:].any()
    assert packed.num_tokens == packed.query_starts[-1] == row == batch.num_tokens
    assert packed.query_lengths.tolist() == [len(piece.token_ids) for piece in batch.slices]


@given(batches())
def test_only_the_last_rows_of_sampled_slices_want_logits(case: tuple[StepBatch, int]) -> None:
    batch, block_size = case
    packed = pack(batch, block_size)
    sampled = [index for index, piece in enumerate(batch.slices) if piece.sampling is not None]
    assert packed.sampled.tolist() == sampled
    assert packed.logits_rows.tolist() == [int(packed.query_starts[index + 1]) - 1 for index in sampled]


def test_the_sampling_settings_follow_the_sampled_slices() -> None:
    cold = SamplingParams(temperature=0.0, seed=2**63 - 1)
    warm = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-1)
    batch = StepBatch(
        [
            SequenceSlice([1, 2], 0, [0], cold, banned_token_ids=[5, 6]),
            SequenceSlice([3], 9, [0, 1, 2], None, banned_token_ids=[4]),
            SequenceSlice([3], 4, [0, 1], warm, banned_token_ids=[8]),
        ]
    )
    settings = pack_sampling(batch)
    assert settings.temperature.tolist() == [0.0, 0.5]
    assert settings.top_p.tolist() == [1.0, np.float32(0.9)]
    assert settings.top_k.tolist() == [0, 7]
    assert settings.min_p.tolist() == [0.0, np.float32(0.1)]
    assert settings.seeds.tolist() == [2**63 - 1, 2**64 - 1]
    assert settings.positions.tolist() == [2, 5]
    assert [part.tolist() for part in settings.banned] == [[0, 0, 1], [5, 6, 8]]
