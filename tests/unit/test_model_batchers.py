"""Greedy tokens of a model are those of transformers under every batcher, padding and held members included."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline_server.config import SchedulingConfig
from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.batchers import Batcher, Batching
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import GenerationRequest
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.model.startup import load
from paceline_server.model.testing import save_tiny_model, tiny_config

SIZES = ((3, 9), (17, 2), (1, 12), (8, 1), (30, 6), (5, 5))  # prompt and output tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length, _ in SIZES]


@torch.inference_mode()
def by_transformers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt, (_, count) in zip(prompts(), SIZES, strict=True):
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def expected(folder):
    return by_transformers(folder)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(
    "batching",
    [Batching(), Batching(Batcher.DYNAMIC), Batching(Batcher.STATIC), Batching(Batcher.STATIC, packed=False)],
    ids=["continuous", "dynamic", "static", "padded"],
)
def test_greedy_tokens_are_those_of_transformers_under_every_batcher(folder, expected, batching, backend):
    loaded = load(tiny_config(folder, engine={"attention_backend": backend}), lambda _: None)
    scheduling = SchedulingConfig(policy="fcfs", admission="none")
    core = EngineCore(loaded.runner, loaded.info, SchedulerLimits(4, 128), scheduling, batching=batching)
    for number, (prompt, (_, count)) in enumerate(zip(prompts(), SIZES, strict=True)):
        request = GenerationRequest(str(number), prompt, count, SamplingParams(temperature=0.0), ignore_eos=True)
        assert core.submit(request) is None
    tokens = [[] for _ in SIZES]
    while core.has_work:
        for output in core.step():
            tokens[int(output.request_id)] += output.token_ids
        core.scheduler.check_integrity()
    assert tokens == expected
