"""The kernels of every instruction set that this processor has give the same logits, in every number format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.model import native_build
from paceline_server.model.attention.cpu import CpuAttention
from paceline_server.model.cache import KVGeometry
from paceline_server.model.checkpoint import Checkpoint
from paceline_server.model.config_file import complete
from paceline_server.model.fused_decoder import FusedDecoder, FusedModel
from paceline_server.model.native import Library, ThreadPool
from paceline_server.model.native_build import INSTRUCTION_SETS, InstructionSet, find_or_build
from paceline_server.model.runner import ModelRunner
from paceline_server.model.testing import save_tiny_model

AVAILABLE = [one for one in INSTRUCTION_SETS if one.requires <= native_build.best_instruction_set().requires]
BLOCK = 5  # no multiple of any register's width
BOUNDS = {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.05}
"""Largest relative error of the logits against float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), initializer_range=0.1)


def logits(folder: Path, kernels: Library, number_format: str) -> Tensor:
    """Of 150 tokens in chunks, then two decodes of different lengths in one step."""
    dtype = "float32" if number_format == "float32" else "bfloat16"
    pool = ThreadPool(2, kernels)
    with Checkpoint(folder) as checkpoint:
        decoder = FusedDecoder(checkpoint, complete(folder), dtype, pool, int8=number_format == "int8")
    attention = CpuAttention(KVGeometry(3, 2, 8, BLOCK, dtype), 64, pool)
    runner = ModelRunner(FusedModel(decoder, attention), BLOCK)
    tokens = torch.randint(3, 97, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    tables, drawn = (list(range(31)), list(range(31, 62))), SamplingParams()
    steps = [
        [SequenceSlice(tokens[:70], 0, tables[0], drawn), SequenceSlice(tokens[:9], 0, tables[1], drawn)],
        [SequenceSlice(tokens[70:], 70, tables[0], drawn), SequenceSlice(tokens[9:10], 9, tables[1], drawn)],
        [SequenceSlice([7], 150, tables[0], drawn), SequenceSlice([8], 10, tables[1], drawn)],
    ]
    return torch.cat([torch.from_numpy(runner.logits(StepBatch(slices))) for slices in steps])


@pytest.mark.parametrize("number_format", BOUNDS)
@pytest.mark.parametrize("instructions", AVAILABLE, ids=lambda instructions: instructions.name)
def test_every_instruction_set_gives_the_logits_of_the_best_in_float32(
    instructions: InstructionSet, number_format: str, folder: Path
) -> None:
    expected = logits(folder, Library(str(find_or_build(AVAILABLE[0]))), "float32")
    result = logits(folder, Library(str(find_or_build(instructions))), number_format)
    assert expected.std() > 0.1
    assert (result - expected).norm() / expected.norm() < BOUNDS[number_format]
