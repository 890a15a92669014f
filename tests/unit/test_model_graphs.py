"""CUDA graphs without CUDA: what is captured when, what is replayed, and that padding changes no logit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.model.attention.hook import attach
from paceline_server.model.attention.triton import TritonAttention
from paceline_server.model.cache import KVGeometry
from paceline_server.model.graphed_model import GraphedModel
from paceline_server.model.graphs import Captured, GraphBook, capture_sizes, empty_decode, pad_decodes
from paceline_server.model.loader import load_model, read_config
from paceline_server.model.packing import PackedBatch, pack
from paceline_server.model.runner import ModelRunner
from paceline_server.model.tensor_cache import KVCache
from paceline_server.model.testing import FakeGraphDevice, save_tiny_model

CPU = torch.device("cpu")


def decodes(*starts: int) -> StepBatch:
    """One token of each sequence, after `starts` others, in blocks of 4."""
    return StepBatch([SequenceSlice([5 + i], start, [i], SamplingParams()) for i, start in enumerate(starts)])


def packed(*starts: int) -> PackedBatch:
    return pack(decodes(*starts), 4)


def book(memory: int = 1000) -> GraphBook:
    return GraphBook((1, 2, 4, 8), memory)


def kept(graphs: GraphBook, size: int, generation: int = 0) -> Captured:
    captured = Captured(lambda: None, 100)
    assert graphs.find(size) is None
    graphs.keep(size, captured, generation)
    return captured


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20)), (64, (1, 2, 4, *range(8, 65, 8)))],
)
def test_small_sizes_are_captured_tightly_and_the_largest_batch_always(most: int, sizes: tuple[int, ...]) -> None:
    assert capture_sizes(most) == sizes


def test_a_decode_is_padded_to_the_next_size_and_anything_else_runs_eagerly() -> None:
    graphs = book()
    assert graphs.padded(packed(0, 1, 2)) == 4
    assert graphs.padded(packed(*range(3), *[1] * 5)) == 8
    assert graphs.padded(packed(*[1] * 9)) is None
    prefill = StepBatch([SequenceSlice([1, 2], 0, [0], SamplingParams())])
    assert graphs.padded(pack(prefill, 4)) is None
    unsampled = StepBatch([SequenceSlice([1], 0, [0], None)])
    assert graphs.padded(pack(unsampled, 4)) is None


def test_the_size_that_was_wanted_most_is_captured_first() -> None:
    graphs = book()
    assert graphs.next_wanted() is None
    for size in (2, 8, 8, 4):
        assert graphs.find(size) is None
    assert graphs.next_wanted() == 8
    kept(graphs, 8)
    assert graphs.next_wanted() == 2, "the smaller one, where both were wanted as often"
    graphs.refuse(2)
    assert graphs.next_wanted() == 4


def test_captures_stop_when_they_hold_what_they_may() -> None:
    graphs = book(memory=200)
    for size in (1, 2):
        kept(graphs, size)
    assert graphs.find(4) is None
    assert graphs.held_bytes == 200
    assert graphs.next_wanted() is None


def test_captures_are_void_when_the_memory_that_they_read_has_moved() -> None:
    graphs = book()
    captured = kept(graphs, 4, generation=1)
    graphs.expect(1)
    assert graphs.find(4) is captured.replay
    graphs.expect(2)
    assert graphs.find(4) is None
    assert graphs.held_bytes == 0
    assert graphs.next_wanted() == 4


def test_padding_writes_nowhere_and_reads_one_key() -> None:
    padded = pad_decodes(packed(6, 2), 4)
    assert padded.num_tokens == len(padded.logits_rows) == 4
    np.testing.assert_array_equal(padded.slots[2:], [-1, -1])
    np.testing.assert_array_equal(padded.kv_lengths, [7, 3, 1, 1])
    np.testing.assert_array_equal(padded.block_table[2:], 0)
    assert pad_decodes(empty_decode(), 2).num_tokens == 2


@pytest.fixture
def graphed(tmp_path: Path) -> tuple[GraphedModel, FakeGraphDevice, KVCache]:
    """A model of one layer on the interpreted kernels."""
    save_tiny_model(tmp_path, num_hidden_layers=1)
    model = load_model(tmp_path, read_config(tmp_path), torch.float32, CPU, 1 << 30)
    cache, device = KVCache(KVGeometry(1, 2, 8, 4, "float32"), 8, CPU), FakeGraphDevice()
    cache.layers.copy_(torch.randn_like(cache.layers))
    attention = TritonAttention(cache, longest=16)
    attach(model.decoder, attention, [None])
    return GraphedModel(model, attention, cache, CPU, book(), device), device, cache


def test_a_replayed_step_gives_the_logits_of_an_eager_one(
    graphed: tuple[GraphedModel, FakeGraphDevice, KVCache],
) -> None:
    model, device, cache = graphed
    runner = ModelRunner(model, 4)
    expected = runner.logits(decodes(3, 2, 1))
    before = cache.layers.clone()
    model.capture_wanted()
    assert torch.equal(cache.layers, before), "a capture leaves the cache alone"
    for _ in range(2):  # capturing may have moved memory, and then is done again
        runner.logits(decodes(3, 2, 1))
        model.capture_wanted()
    replays = device.replays
    torch.testing.assert_close(runner.logits(decodes(3, 2, 1)), expected, rtol=1e-5, atol=1e-5)
    assert device.replays == replays + 1


def test_a_device_without_room_is_not_asked_again(graphed: tuple[GraphedModel, FakeGraphDevice, KVCache]) -> None:
    model, device, _ = graphed
    device.full = True
    runner = ModelRunner(model, 4)
    runner.logits(decodes(1))
    model.capture_wanted()
    device.full = False
    model.capture_wanted()
    assert device.captures == 0
    assert runner.logits(decodes(1)).shape == (1, 97)
