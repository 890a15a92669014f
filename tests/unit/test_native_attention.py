"""The C++ attention against the reference back end, step by step on the same random sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline_server.engine.batch import SequenceSlice, StepBatch
from paceline_server.model.attention.cpu import CpuAttention
from paceline_server.model.attention.interface import ScoreRule
from paceline_server.model.attention.reference import ReferenceAttention
from paceline_server.model.cache import KVCache, KVGeometry
from paceline_server.model.native import ThreadPool
from paceline_server.model.packing import pack

LAYERS = 2
BFLOAT16_BOUND = 0.03
"""Largest difference from float32 attention, for queries, keys and values of standard deviation 1: queries, weights of
the softmax and outputs carry 8 bits."""


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


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 100), min_size=1, max_size=4))
    return Case(
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 16])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 7, 20, 64, 80])),
        block_size=draw(st.sampled_from([1, 3, 4, 16, 24, 32, 128])),
        lengths=lengths,
        cuts=[sorted(draw(st.sets(st.integers(1, length), max_size=5)) | {length}) for length in lengths],
        seed=draw(st.integers(0, 2**31)),
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


def largest_difference(case: Case, dtype: torch.dtype, pool: ThreadPool) -> float:
    """Run both back ends over all steps; the reference always in float32."""
    torch.manual_seed(case.seed)
    blocks_each = [-(-length // case.block_size) for length in case.lengths]
    free = torch.randperm(sum(blocks_each) + 2).tolist()  # blocks of a sequence lie anywhere
    tables = [[free.pop() for _ in range(count)] for count in blocks_each]
    geometry = KVGeometry(LAYERS, case.kv_heads, case.head_dim, case.block_size, dtype)
    floats = KVGeometry(LAYERS, case.kv_heads, case.head_dim, case.block_size, torch.float32)
    native = CpuAttention(geometry, sum(blocks_each) + 2, pool)
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
            result = attend(native, layer, query.to(dtype), key.to(dtype), value.to(dtype))
            expected = attend(reference, layer, query, key, value)
            assert result.dtype == dtype
            assert result.is_contiguous()
            worst = max(worst, float((result.float() - expected).abs().max()))
    return worst


def attend(backend: CpuAttention | ReferenceAttention, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return backend.forward(layer, query, key, value, ScoreRule(query.shape[-1] ** -0.5))


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_float32_equals_the_reference(case: Case, pool: ThreadPool) -> None:
    assert largest_difference(case, torch.float32, pool) < 1e-5


@given(case=cases())
@settings(max_examples=50, deadline=None)
def test_bfloat16_stays_within_its_precision(case: Case, pool: ThreadPool) -> None:
    assert largest_difference(case, torch.bfloat16, pool) < BFLOAT16_BOUND


@pytest.mark.parametrize("length", [255, 256, 1025, 2500])
@pytest.mark.parametrize("block_size", [5, 16])
def test_long_sequences_that_are_cut_between_threads_equal_the_reference(
    length: int, block_size: int, pool: ThreadPool
) -> None:
    cuts = [[length - 2, length - 1, length]]
    case = Case(6, 2, 16, block_size, lengths=[length], cuts=cuts, seed=length)
    assert largest_difference(case, torch.float32, pool) < 1e-5


def test_a_cache_larger_than_memory_is_refused(pool: ThreadPool) -> None:
    with pytest.raises(Exception, match="not enough memory"):
        CpuAttention(KVGeometry(1 << 10, 1 << 10, 1 << 10, 1 << 10, torch.float32), 1 << 20, pool)
