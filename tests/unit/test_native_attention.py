"""The C++ attention against the reference back end, step by step on the same random sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server.engine.batch import SequenceSlice, StepBatch
from paceline_server.model.attention.interface import ScoreRule
from paceline_server.model.attention.reference import ReferenceAttention
from paceline_server.model.cache import KVGeometry
from paceline_server.model.native import ThreadPool
from paceline_server.model.packing import pack
from paceline_server.model.tensor_cache import KVCache
from paceline_server.model.testing import TorchCpuAttention

LAYERS = 2
BFLOAT16_BOUND = 0.03
"""Largest difference from float32 attention, for queries, keys and values of standard deviation 1: queries, weights of
the softmax and outputs carry 8 bits."""

INT8_BOUND = 0.08
"""The same for keys and values of 8 bits, whose step is a 127th of the largest of a row: some 0.03 here."""


@dataclass(frozen=True)
class Case:
    """Sequences that share a pool, and how a few steps cut them into slices."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    lengths: list[int]
    cuts: list[list[int]]
    seed: int
    rule: ScoreRule


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([4, 7, 20, 64, 80]))
    lengths = draw(st.lists(st.integers(1, 100), min_size=1, max_size=4))
    return Case(
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 16])),
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=draw(st.sampled_from([1, 3, 4, 16, 24, 32, 128])),
        lengths=lengths,
        cuts=[sorted(draw(st.sets(st.integers(1, length), max_size=5)) | {length}) for length in lengths],
        seed=draw(st.integers(0, 2**31)),
        rule=ScoreRule(head_dim**-0.5, draw(st.none() | st.integers(1, 110)), draw(st.sampled_from([None, 0.7, 30.0]))),
    )


@pytest.fixture(scope="module", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """These problems are too small to share between torch's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(2)


def largest_difference(case: Case, dtype: torch.dtype, pool: ThreadPool, cache_format: str | None = None) -> float:
    """Run both back ends over all steps; the reference always in float32. The cache is `dtype`'s unless it is given."""
    torch.manual_seed(case.seed)
    blocks_each = [-(-length // case.block_size) for length in case.lengths]
    free = torch.randperm(sum(blocks_each) + 2).tolist()  # blocks of a sequence lie anywhere
    tables = [[free.pop() for _ in range(count)] for count in blocks_each]
    cache_format = cache_format or str(dtype).removeprefix("torch.")
    geometry = KVGeometry(LAYERS, case.kv_heads, case.head_dim, case.block_size, cache_format)
    floats = KVGeometry(LAYERS, case.kv_heads, case.head_dim, case.block_size, "float32")
    native = TorchCpuAttention(geometry, sum(blocks_each) + 2, pool)
    reference = ReferenceAttention(KVCache(floats, sum(blocks_each) + 2, torch.device("cpu")))
    worst = 0.0
    for step in range(max(len(cuts) for cuts in case.cuts)):
        spans = {i: ([0, *cuts][step], cuts[step]) for i, cuts in enumerate(case.cuts) if step < len(cuts)}
        slices = [SequenceSlice([0] * (end - begin), begin, tables[i], None) for i, (begin, end) in spans.items()]
        batch = pack(StepBatch(slices), case.block_size)
        native.plan(batch)
        reference.plan(batch)
        for layer in range(LAYERS):
            query = torch.randn(batch.num_tokens, case.heads, case.head_dim)
            key, value = torch.randn(2, batch.num_tokens, case.kv_heads, case.head_dim)
            result = native.forward(layer, query.to(dtype), key.to(dtype), value.to(dtype), case.rule)
            expected = reference.forward(layer, query, key, value, case.rule)
            assert result.dtype == dtype
            assert result.is_contiguous()
            worst = max(worst, float((result.float() - expected).abs().max()))
    return worst


@given(case=cases())
@settings(max_examples=100)
def test_float32_equals_the_reference(case: Case, pool: ThreadPool) -> None:
    assert largest_difference(case, torch.float32, pool) < 1e-5


@given(case=cases())
@settings(max_examples=50)
def test_bfloat16_stays_within_its_precision(case: Case, pool: ThreadPool) -> None:
    assert largest_difference(case, torch.bfloat16, pool) < BFLOAT16_BOUND


@given(case=cases())
@settings(max_examples=30)
def test_an_int8_cache_stays_within_its_precision(case: Case, pool: ThreadPool) -> None:
    assert largest_difference(case, torch.float32, pool, "int8") < INT8_BOUND


@pytest.mark.parametrize("length", [255, 256, 1025, 2500])
@pytest.mark.parametrize(("block_size", "window"), [(5, None), (16, None), (16, 700), (32, 33)])
def test_long_sequences_that_are_cut_between_threads_equal_the_reference(
    length: int, block_size: int, window: int | None, pool: ThreadPool
) -> None:
    last_steps = [length - 43, length - 42, length - 40, length]  # one token, two, forty
    cuts, rule = [last_steps], ScoreRule(0.25, window)
    case = Case(6, 2, 16, block_size, lengths=[length], cuts=cuts, seed=length, rule=rule)
    assert largest_difference(case, torch.float32, pool) < 1e-5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [(9, 3, 64, 16, None), (8, 8, 20, 24, 600), (32, 4, 32, 5, None), (8, 1, 80, 128, 513), (97, 1, 16, 33, None)],
)
def test_decodes_and_chunks_behind_many_keys_share_a_step_and_equal_the_reference(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None, threads: int
) -> None:
    # What decodes and chunks of two and of many tokens make of 512 and more keys, in ranges and whole, side by side.
    cached, chunks = [511, 1023, 768, 2], [1, 2, 97, 3]
    lengths = [before + count for before, count in zip(cached, chunks, strict=True)]
    cuts = [[before, length] for before, length in zip(cached, lengths, strict=True)]
    rule = ScoreRule(head_dim**-0.5, window)
    case = Case(heads, kv_heads, head_dim, block_size, lengths, cuts, seed=heads, rule=rule)
    assert largest_difference(case, torch.float32, ThreadPool(threads)) < 1e-5


def test_layers_of_different_windows_share_a_step(pool: ThreadPool) -> None:
    geometry = KVGeometry(LAYERS, 2, 16, 4, "float32")
    native = TorchCpuAttention(geometry, 12, pool)
    reference = ReferenceAttention(KVCache(geometry, 12, torch.device("cpu")))
    batch = pack(StepBatch([SequenceSlice([0] * 40, 0, range(10), None), SequenceSlice([0], 0, [11], None)]), 4)
    query, key, value = torch.randn(41, 4, 16), torch.randn(41, 2, 16), torch.randn(41, 2, 16)
    for backend in (native, reference):
        backend.plan(batch)
    for layer, window in ((0, 5), (1, None), (0, 9)):
        rule = ScoreRule(0.25, window)
        expected = reference.forward(layer, query, key, value, rule)
        torch.testing.assert_close(native.forward(layer, query, key, value, rule), expected, rtol=0, atol=1e-5)


def test_a_cache_larger_than_memory_is_refused(pool: ThreadPool) -> None:
    with pytest.raises(Exception, match="not enough memory"):
        TorchCpuAttention(KVGeometry(1 << 10, 1 << 10, 1 << 10, 1 << 10, "float32"), 1 << 20, pool)
