"""Side by side with transformers' `generate`, greedy, in float32: the same token ids, whatever the engine does.

32 prompts of 1 to some 400 tokens run together through the real step loop, with whole and with chunked prefill, with
small and with large blocks, and once more with a pool so small that sequences are preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from paceline_server.config import parse
from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import GenerationRequest
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.model.startup import load
from paceline_server.model.testing import generate

pytestmark = pytest.mark.timeout(900)

NEW_TOKENS = 12
CLEAR_MARGIN = 1e-3
"""Two float32 programs differ by some 1e-5 in a logit; a lead smaller than this one would decide by chance."""

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
QUESTIONS = (
    "Name the capital city of France.",
    "Count from 1 to 10.",
    "What colour is the sky on a clear day?",
    "Translate 'good morning' into French.",
    "Write one sentence about the sea.",
    "Which is larger, 17 or 71?",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
)
BEGINNINGS = (
    "The",
    "1, 2, 3, 4, 5,",
    "Once upon a time",
    "def fibonacci(n):\n",
    "The quick brown fox jumps over the lazy",
    "Water boils at a temperature of",
    "SELECT name, age FROM users WHERE",
    "In the beginning of the nineteenth century, most people in Europe",
)
PARAGRAPH = (
    "A lighthouse stands at the end of the pier. Every evening the keeper climbs its ninety-six steps, lights the lamp "
    "and writes the weather into a book. Ships pass in the night; some of them answer with a horn. "
)


@dataclass(frozen=True)
class Expected:
    """What `generate` made of each prompt."""

    prompts: list[list[int]]
    outputs: list[list[int]]


@pytest.fixture(scope="module")
def expected(smollm2_model: Path, _one_thread: None) -> Expected:
    tokenizer = Tokenizer.from_file(str(smollm2_model / "tokenizer.json"))
    texts = [CHAT.format(question) for question in QUESTIONS]
    texts += BEGINNINGS
    texts += [PARAGRAPH + beginning for beginning in BEGINNINGS]
    texts += [CHAT.format(PARAGRAPH * index + question) for index, question in enumerate(QUESTIONS)]
    prompts = [tokenizer.encode(text).ids for text in texts]
    model = AutoModelForCausalLM.from_pretrained(smollm2_model, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        tokens, lead = generate(model, prompt, NEW_TOKENS)
        assert lead > CLEAR_MARGIN, f"too close to call: {tokenizer.decode(prompt)!r}"
        outputs.append(tokens)
    return Expected(prompts, outputs)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other are no faster where the cores are shared with other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load_core(folder: Path, block_size: int, budget: int, memory_gb: float = 1.0, **kv_cache: Any) -> EngineCore:
    """Load the model; where there is swap space, a preempted sequence always goes there."""
    config = parse(
        {
            "engine": {
                "model_path": str(folder),
                "dtype": "float32",
                "device": "cpu",
                "threads": 1,
                "max_model_len": 512,
            },
            "batching": {"max_batch_size": 32, "max_tokens_in_batch": budget},
            "kv_cache": {"block_size_tokens": block_size, "cpu_memory_gb": memory_gb, **kv_cache},
        }
    )
    loaded = load(config, lambda _: None)
    info = replace(loaded.info, block_copy_seconds=-1.0)
    return EngineCore(loaded.runner, info, SchedulerLimits(32, budget), files=loaded.files)


def run(folder: Path, prompts: list[list[int]], block_size: int, budget: int, memory_gb: float = 1.0) -> EngineCore:
    """Load the model and give the step loop all prompts at once."""
    core = load_core(folder, block_size, budget, memory_gb)
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(str(index), prompt, NEW_TOKENS, SamplingParams(temperature=0.0))
        assert core.submit(request) is None
    return core


def outputs_of(core: EngineCore, count: int) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(count)]
    while core.has_work:
        for output in core.step():
            tokens[int(output.request_id)].extend(output.token_ids)
    return tokens


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("budget", [64, 4096], ids=["chunked", "whole"])
def test_32_prompts_together_give_the_tokens_of_generate(
    smollm2_model: Path, expected: Expected, block_size: int, budget: int
) -> None:
    assert len(expected.prompts) == 32
    lengths = [len(prompt) for prompt in expected.prompts]
    assert min(lengths) == 1
    assert max(lengths) > 300
    core = run(smollm2_model, expected.prompts, block_size, budget)
    assert outputs_of(core, 32) == expected.outputs


def test_sequences_that_were_preempted_give_the_same_tokens(smollm2_model: Path, expected: Expected) -> None:
    core = run(smollm2_model, expected.prompts, block_size=2, budget=512, memory_gb=0.02)  # 466 tokens: a fifth
    assert outputs_of(core, 32) == expected.outputs
    assert core.stats().preemptions > 0


def test_sequences_that_were_swapped_evicted_offloaded_and_forked_give_the_same_tokens(
    smollm2_model: Path, expected: Expected, tmp_path: Path
) -> None:
    """Twice the same prompts, some with two answers, while neighbours come and are cancelled; all on a small pool."""
    offload = {"host_memory_gb": 0.03, "disk_path": str(tmp_path), "disk_gb": 0.2}
    core = load_core(smollm2_model, 4, 256, memory_gb=0.03, swap_space_gb=0.1, offload=offload)
    tokens: dict[tuple[str, int], list[int]] = {}
    for turn in range(2):
        for index, prompt in enumerate(expected.prompts):
            greedy = SamplingParams(temperature=0.0)
            request = GenerationRequest(f"{turn} {index}", prompt, NEW_TOKENS, greedy, n=2 if index % 4 == 0 else 1)
            assert core.submit(request) is None
            if index % 5 == 0:
                core.submit(GenerationRequest(f"neighbour {index}", prompt[: index + 1], 50, greedy))
        steps = 0
        while core.has_work:
            for output in core.step():
                tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            core.scheduler.check_integrity()
            steps += 1
            if steps == 20:
                for index in range(0, 32, 5):
                    core.abort(f"neighbour {index}")
    for index, output in enumerate(expected.outputs):
        for turn in range(2):
            for answer in range(2 if index % 4 == 0 else 1):
                assert tokens[f"{turn} {index}", answer] == output
    stats = core.stats()
    assert stats.swapped_in_blocks > 0
    assert stats.offloaded_blocks["returned"] > 0
    assert stats.offloaded_blocks["failed_reads"] == 0
