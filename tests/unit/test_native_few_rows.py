"""A few rows go through products in a way of their own (csrc/tile.h, Streams), which shows in nothing but time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.model.startup import load
from paceline_server.model.testing import save_tiny_model, tiny_config

GREEDY = SamplingParams(temperature=0.0)
ODD = {"hidden_size": 36, "intermediate_size": 76}  # words of int8 that come in no pairs, panels in no fours
PROMPTS = [[3 + 5 * index + place for place in range(1 + index)] for index in range(7)]


@pytest.mark.parametrize("sizes", [ODD, {}], ids=["odd", "even"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("number_format", ["float32", "bfloat16", "int8"])
def test_a_sequence_has_the_same_logits_alone_among_a_few_and_among_many(
    tmp_path: Path, number_format: str, threads: int, sizes: dict[str, int]
) -> None:
    dtype = {"quantization": "int8"} if number_format == "int8" else {"dtype": number_format}
    folder = save_tiny_model(tmp_path, **sizes)
    runner = load(tiny_config(folder, engine={"threads": threads, **dtype}), lambda _: None).runner
    for index, prompt in enumerate(PROMPTS):
        runner.execute(StepBatch([SequenceSlice(prompt, 0, [2 * index, 2 * index + 1], None)]))
    decodes = [
        SequenceSlice([50 + index], len(prompt), [2 * index, 2 * index + 1], GREEDY)
        for index, prompt in enumerate(PROMPTS)
    ]
    together = runner.logits(StepBatch(decodes)).copy()
    for count in (1, 2, 3, 4, 5):
        few = runner.logits(StepBatch(decodes[:count]))
        np.testing.assert_array_equal(few, together[:count], err_msg=f"{count} of {len(decodes)} rows")
