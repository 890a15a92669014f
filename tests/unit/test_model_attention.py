"""Paged attention against attention written out densely: all keys at hand, heads repeated, a triangle for a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface

from paceline_server.engine.batch import SequenceSlice, StepBatch
from paceline_server.errors import ModelUnsupported
from paceline_server.model.attention.hook import IMPLEMENTATION, LayerAttention
from paceline_server.model.attention.interface import PagedAttention, ScoreRule
from paceline_server.model.attention.reference import ReferenceAttention
from paceline_server.model.attention.triton import TritonAttention
from paceline_server.model.cache import KVGeometry
from paceline_server.model.packing import pack
from paceline_server.model.tensor_cache import KVCache

LAYERS = 2


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
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    return Case(
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 16, 20])),
        block_size=draw(st.sampled_from([1, 3, 4, 16])),
        lengths=lengths,
        cuts=[sorted(draw(st.sets(st.integers(1, length), max_size=6)) | {length}) for length in lengths],
        seed=draw(st.integers(0, 2**31)),
        rule=ScoreRule(
            scale=draw(st.sampled_from([0.125, 1.0])),
            window=draw(st.none() | st.integers(1, 45)),
            softcap=draw(st.sampled_from([None, 1.5, 30.0])),
        ),
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These problems are too small to share between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def written_out(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
    """Causal attention of one whole sequence: query [L, H, D], key and value [L, K, D]."""
    length, heads, _ = query.shape
    key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = scores.masked_fill((distance < 0) | (distance >= (rule.window or length)), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value)


def random_tensors(case: Case, length: int) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(length, case.heads, case.head_dim)
    key, value = torch.randn(2, length, case.kv_heads, case.head_dim)
    return query, key, value


def attend_in_steps(
    case: Case, dtype: torch.dtype, make: Callable[[KVCache], PagedAttention] = ReferenceAttention
) -> tuple[list[Tensor], list[Tensor]]:
    """Run all sequences through the back end, each cut into slices; returns what came out and what should have."""
    torch.manual_seed(case.seed)
    blocks_each = [-(-length // case.block_size) for length in case.lengths]
    pool = torch.randperm(sum(blocks_each) + 2).tolist()  # blocks of a sequence lie anywhere
    tables = [[pool.pop() for _ in range(count)] for count in blocks_each]
    geometry = KVGeometry(LAYERS, case.kv_heads, case.head_dim, case.block_size, str(dtype).removeprefix("torch."))
    cache = KVCache(geometry, sum(blocks_each) + 2, torch.device("cpu"))
    cache.layers.fill_(3.0)  # left over from sequences that are gone: finite, and of no influence
    attention = make(cache)
    tensors = [[random_tensors(case, length) for _ in range(LAYERS)] for length in case.lengths]
    expected = [torch.stack([written_out(*layer, case.rule) for layer in sequence]) for sequence in tensors]
    results = [torch.full_like(whole, torch.nan) for whole in expected]
    for step in range(max(len(cuts) for cuts in case.cuts)):
        taking_part = [index for index, cuts in enumerate(case.cuts) if step < len(cuts)]
        spans = [(([0, *case.cuts[index]])[step], case.cuts[index][step]) for index in taking_part]
        batch = StepBatch(
            [
                SequenceSlice([0] * (end - begin), begin, tables[index], None)
                for index, (begin, end) in zip(taking_part, spans, strict=True)
            ]
        )
        attention.plan(pack(batch, case.block_size))
        for layer in range(LAYERS):
            packed = [
                torch.cat(
                    [tensors[i][layer][part][begin:end] for i, (begin, end) in zip(taking_part, spans, strict=True)]
                )
                for part in range(3)
            ]
            output = attention.forward(layer, *(tensor.to(dtype) for tensor in packed), case.rule)
            assert output.is_contiguous()
            rows = output.float().split([end - begin for begin, end in spans])
            for index, (begin, end), piece in zip(taking_part, spans, rows, strict=True):
                results[index][layer, begin:end] = piece
    return results, expected


@given(cases())
@settings(max_examples=120)
def test_slices_over_scattered_blocks_equal_whole_sequences_written_out(case: Case) -> None:
    results, expected = attend_in_steps(case, torch.float32)
    for result, whole in zip(results, expected, strict=True):
        torch.testing.assert_close(result, whole, rtol=1e-5, atol=1e-5)


@given(cases())
@settings(max_examples=20)
def test_bfloat16_stays_within_its_precision(case: Case) -> None:
    results, expected = attend_in_steps(case, torch.bfloat16)
    for result, whole in zip(results, expected, strict=True):
        torch.testing.assert_close(result, whole, rtol=0.04, atol=0.04)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [[1], [1] * 9, [40, 1, 7, 1, 33, 2]])
def test_decodes_of_very_different_lengths_share_a_step(lengths: list[int], window: int | None) -> None:
    cuts = [sorted({max(1, length - 2), max(1, length - 1), length}) for length in lengths]
    rule = ScoreRule(0.3, window)
    case = Case(heads=4, kv_heads=2, head_dim=8, block_size=4, lengths=lengths, cuts=cuts, seed=1, rule=rule)
    results, expected = attend_in_steps(case, torch.float32)
    for result, whole in zip(results, expected, strict=True):
        torch.testing.assert_close(result, whole, rtol=1e-5, atol=1e-5)


def interpreted_triton(cache: KVCache) -> TritonAttention:
    return TritonAttention(cache, longest=700)


@given(cases())
@settings(max_examples=4)
def test_the_triton_kernels_equal_whole_sequences_written_out(case: Case) -> None:
    results, expected = attend_in_steps(case, torch.float32, interpreted_triton)
    for result, whole in zip(results, expected, strict=True):
        torch.testing.assert_close(result, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.04), (torch.float16, 0.005)])
def test_the_triton_kernels_stay_within_the_precision_of_16_bits(dtype: torch.dtype, bound: float) -> None:
    case = Case(6, 2, 20, 4, lengths=[33, 1], cuts=[[17, 32, 33], [1]], seed=3, rule=ScoreRule(0.2, 20, 5.0))
    results, expected = attend_in_steps(case, dtype, interpreted_triton)
    for result, whole in zip(results, expected, strict=True):
        torch.testing.assert_close(result, whole, rtol=bound, atol=bound)


@pytest.mark.parametrize(("heads", "window"), [(1, None), (20, 30)])
def test_decodes_that_triton_splits_are_merged_to_the_whole(heads: int, window: int | None) -> None:
    lengths, rule = [70, 9], ScoreRule(0.25, window)
    case = Case(heads, 1, 16, 16, lengths, cuts=[[68, 69, 70], [7, 8, 9]], seed=4, rule=rule)
    results, expected = attend_in_steps(case, torch.float32, interpreted_triton)
    for result, whole in zip(results, expected, strict=True):
        torch.testing.assert_close(result, whole, rtol=1e-5, atol=1e-5)


class Sum:
    """An attention back end that adds each row's own value to its query, one key head for all, and keeps the rule."""

    rule: ScoreRule

    def plan(self, batch: object) -> None:
        raise AssertionError("plan is the runner's affair")

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        self.rule = rule
        return query + value


def call_hook(query: Tensor, value: Tensor, **others: object) -> tuple[Tensor, ScoreRule]:
    """Attention as a transformers module calls it, in a layer with a window of 32."""
    module, backend = torch.nn.Module(), Sum()
    module.paceline_attention = LayerAttention(backend, 0, 32)
    output, _ = AttentionInterface()[IMPLEMENTATION](module, query, value, value, None, scaling=0.5, **others)
    return output, backend.rule


QUERY, VALUE = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 4)


def test_the_hook_turns_transformers_layout_into_packed_rows_and_back() -> None:
    output, _ = call_hook(QUERY, VALUE, position_ids=torch.arange(5))
    torch.testing.assert_close(output, (QUERY + VALUE).transpose(1, 2))


@pytest.mark.parametrize("argument", [{"s_aux": torch.zeros(2)}, {"sinks": 1.0}])
def test_an_argument_that_would_change_attention_is_refused_by_name(argument: dict[str, object]) -> None:
    with pytest.raises(ModelUnsupported, match=next(iter(argument))):
        call_hook(QUERY, VALUE, **argument)


@pytest.mark.parametrize("passed", [{}, {"sliding_window": 32}])
def test_the_window_holds_whether_the_module_passes_it_on_or_leaves_it_to_a_mask(passed: dict[str, object]) -> None:
    _, rule = call_hook(QUERY, VALUE, softcap=30.0, **passed)
    assert rule == ScoreRule(0.5, 32, 30.0)
