"""Blocks that are copied on the device, to host memory and back hold what they held, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline_server.engine.batch import BlockCopy, CopyKind, SamplingParams, SequenceSlice, StepBatch
from paceline_server.errors import OutOfMemory
from paceline_server.model.cache import host_bytes_for
from paceline_server.model.runner import Logits, ModelRunner
from paceline_server.model.startup import load
from paceline_server.model.testing import save_tiny_model, tiny_config

PROMPT = list(range(5, 15))  # two full blocks of four, and half of one
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, backend: str, tmp_path: Path) -> ModelRunner:
    engine = {"attention_backend": backend, "dtype": request.param}
    folder = save_tiny_model(tmp_path)
    loaded = load(tiny_config(folder, engine=engine, kv_cache={"swap_space_gb": 1 / 1024}), lambda _: None)
    assert loaded.info.swap_slots > 8
    assert loaded.info.block_copy_seconds > 0
    assert isinstance(loaded.runner, ModelRunner)
    return loaded.runner


def next_logits(runner: ModelRunner, table: list[int], copies: list[BlockCopy]) -> Logits:
    """Logits of one more token after the prompt, whose KV is in the blocks of `table` once the copies are done."""
    runner.model.storage.move(copies)
    return runner.logits(StepBatch([SequenceSlice([3], len(PROMPT), table, GREEDY)]))


def test_a_copy_of_a_sequences_blocks_gives_the_same_logits(runner: ModelRunner) -> None:
    runner.execute(StepBatch([SequenceSlice(PROMPT, 0, [0, 1, 2], None)]))
    expected = next_logits(runner, [0, 1, 2], [])
    within = [BlockCopy(CopyKind.WITHIN, block, block + 10) for block in range(3)]
    assert np.array_equal(next_logits(runner, [10, 11, 12], within), expected)
    out = [BlockCopy(CopyKind.OUT, block, 7 - block) for block in range(3)]
    back = [BlockCopy(CopyKind.IN, 7 - block, block + 20) for block in range(3)]
    assert np.array_equal(next_logits(runner, [20, 21, 22], [*out, *back]), expected)


def test_copies_are_done_in_their_order(runner: ModelRunner) -> None:
    runner.execute(StepBatch([SequenceSlice(PROMPT, 0, [0, 1, 2], None)]))
    expected = next_logits(runner, [0, 1, 2], [])
    swapped = [
        BlockCopy(CopyKind.OUT, 0, 0),
        BlockCopy(CopyKind.WITHIN, 1, 0),
        BlockCopy(CopyKind.IN, 0, 1),
    ]
    assert np.array_equal(next_logits(runner, [1, 0, 2], swapped), expected)


def test_a_slot_holds_all_bytes_of_a_block(runner: ModelRunner) -> None:
    storage = runner.model.storage
    runner.execute(StepBatch([SequenceSlice(PROMPT, 0, [0, 1, 2], None)]))
    storage.move([BlockCopy(CopyKind.OUT, 0, 0), BlockCopy(CopyKind.OUT, 1, 1), BlockCopy(CopyKind.OUT, 0, 2)])
    assert storage.host.dtype == np.uint8
    assert storage.host.shape[1] == storage.block_bytes
    assert np.array_equal(storage.host[0], storage.host[2])
    assert not np.array_equal(storage.host[0], storage.host[1])


def test_host_memory_that_the_machine_does_not_have_is_refused_by_name() -> None:
    assert host_bytes_for(0.0, 0.0, available=-5) == 0
    with pytest.raises(OutOfMemory, match=r"kv_cache\.swap_space_gb and kv_cache\.offload"):
        host_bytes_for(0.25, 0.75, available=1 << 29)
