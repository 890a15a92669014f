"""A deterministic request gives the same bits in any company, and however it is cut into steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import GenerationRequest
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, model_info
from paceline_server.model.runner import ModelRunner
from paceline_server.model.startup import load
from paceline_server.model.testing import save_tiny_model, tiny_config

LENGTH = 1100  # long enough for a step with little else to share its keys out among tasks
PROMPT = [(7 * number) % 90 + 3 for number in range(LENGTH)]
TABLE = list(range(70))
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 96, "head_dim": 16, "max_position_embeddings": 2048}
    return save_tiny_model(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    engine: dict[str, Any] = {"attention_backend": "cpu", "dtype": request.param}
    if request.param == "int8":
        engine |= {"dtype": "float32", "quantization": "int8"}
    batching = {"max_tokens_in_batch": 1200, "max_batch_size": 40}
    cache = {"block_size_tokens": 16, "cpu_memory_gb": 0.1}
    loaded = load(tiny_config(folder, engine=engine, batching=batching, kv_cache=cache), lambda _: None)
    assert loaded.info.deterministic
    assert isinstance(loaded.runner, ModelRunner)
    return loaded.runner


def piece(begin: int, end: int, *, deterministic: bool = True) -> SequenceSlice:
    return SequenceSlice(PROMPT[begin:end], begin, TABLE, GREEDY, deterministic=deterministic)


def logits(runner: ModelRunner, first: SequenceSlice, *others: SequenceSlice) -> torch.Tensor:
    return torch.as_tensor(runner.logits(StepBatch([first, *others])))[0].clone()


def company(count: int) -> list[SequenceSlice]:
    """Others that decode, and one that computes a prompt."""
    decoding = [SequenceSlice([9], 3, [80 + number], GREEDY) for number in range(count)]
    return [*decoding, SequenceSlice(PROMPT[:40], 0, [130, 131, 132], GREEDY)]


def test_alone_in_company_and_in_chunks_the_bits_are_the_same(runner: ModelRunner) -> None:
    whole = logits(runner, piece(0, LENGTH))
    for cut in (1, 500, LENGTH - 3, LENGTH - 1):
        runner.logits(StepBatch([piece(0, cut), *company(5)]))
        assert torch.equal(logits(runner, piece(cut, LENGTH)), whole), f"cut at {cut}"
        assert torch.equal(logits(runner, piece(cut, LENGTH), *company(7)), whole), f"cut at {cut}, in company"
    for count in (1, 2, 8, 20):
        assert torch.equal(logits(runner, piece(LENGTH - 1, LENGTH), *company(count)), whole)


@pytest.mark.parametrize("runner", ["float32"], indirect=True)
def test_without_asking_for_it_they_are_not(runner: ModelRunner) -> None:
    """Else the other test would prove nothing; rounding to fewer bits may hide it."""
    plain = piece(LENGTH - 1, LENGTH, deterministic=False)
    whole = logits(runner, piece(0, LENGTH))
    assert not torch.equal(logits(runner, plain), whole)


def test_it_shares_prefixes_only_with_others_of_its_kind() -> None:
    info = replace(model_info(), deterministic=True)
    core = EngineCore(FakeRunner(info), info, SchedulerLimits(4, 64))
    cached = []
    for number, deterministic in enumerate((False, True, False, True)):
        core.submit(GenerationRequest(str(number), list(range(1, 18)), 1, deterministic=deterministic))
        while core.has_work:
            cached += [output.cached_tokens for output in core.step()]
    assert cached == [0, 0, 16, 16]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_back_end_that_cannot_promise_it_refuses_it_by_name_and_computes_nothing(name: str, n: int) -> None:
    info = replace(model_info(), attention_backend=name)
    core = EngineCore(FakeRunner(info), info, SchedulerLimits(4, 64))
    refusal = core.submit(GenerationRequest("a", [1, 2], 1, n=n, deterministic=True))
    assert refusal is not None
    assert refusal.retry_after is None
    assert f"not {name}" in refusal.message
    assert "back end cpu (engine.attention_backend)" in refusal.message
    assert not core.has_work


def test_a_model_on_the_reference_back_end_does_not_promise_it(folder: Path) -> None:
    loaded = load(tiny_config(folder, engine={"attention_backend": "reference"}), lambda _: None)
    assert not loaded.info.deterministic
