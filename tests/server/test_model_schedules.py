"""Greedy tokens equal those of transformers' `generate`, whatever becomes of a sequence on its way.

A small model with random weights, in float32, through the real step loop on both back ends: every chunk size, preempted
by either way, evicted and brought back from host memory and disk, forked, and beside neighbours that come and go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import GenerationRequest
from paceline_server.engine.loop import Loaded
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.model.startup import load
from paceline_server.model.testing import generate, save_tiny_model, tiny_config

NEW_TOKENS = 10
CLEAR_MARGIN = 1e-3
"""Two float32 programs differ by some 1e-6 in these logits; a smaller lead than this one would decide by chance."""

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Expected:
    """What `generate` made of each prompt."""

    folder: Path
    prompts: list[list[int]]
    outputs: list[list[int]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Twelve prompts of 1 to 90 tokens that share prefixes, each with a clear answer."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    random = Random(0)
    base = [random.randint(3, 96) for _ in range(80)]
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    while len(prompts) < 12:
        prompt = [
            *base[: random.choice((0, 7, 16, 33, 64, 80))],
            *(random.randint(3, 96) for _ in range(random.randint(1, 10))),
        ]
        tokens, lead = generate(model, prompt, NEW_TOKENS)
        if lead > CLEAR_MARGIN:
            prompts.append(prompt)
            outputs.append(tokens)
    return Expected(folder, prompts, outputs)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def gib_of_a_block(folder: Path, backend: str) -> float:
    """Of four tokens; what the kernels pad depends on the processor."""
    engine = {"dtype": "float32", "attention_backend": backend}
    return load(tiny_config(folder, engine=engine), lambda _: None).info.block_bytes / (1 << 30)


def load_tiny(folder: Path, backend: str, blocks: int, **kv_cache: Any) -> Loaded:
    engine = {"dtype": "float32", "attention_backend": backend}
    memory = {"block_size_tokens": 4, "cpu_memory_gb": (blocks + 0.5) * gib_of_a_block(folder, backend)}
    loaded = load(tiny_config(folder, engine=engine, kv_cache=memory | kv_cache), lambda _: None)
    assert isinstance(loaded, Loaded)
    assert loaded.info.num_blocks == blocks
    return loaded


def core_of(
    loaded: Loaded, *, batch: int = 6, budget: int = 24, prefix_caching: bool = True, **info: Any
) -> EngineCore:
    return EngineCore(
        loaded.runner,
        replace(loaded.info, **info),
        SchedulerLimits(batch, budget),
        prefix_caching=prefix_caching,
        files=loaded.files,
    )


def request(name: str, prompt: list[int], n: int = 1, max_tokens: int = NEW_TOKENS) -> GenerationRequest:
    return GenerationRequest(name, prompt, max_tokens, GREEDY, n=n)


def drain(core: EngineCore, tokens: dict[tuple[str, int], list[int]] | None = None) -> dict[tuple[str, int], list[int]]:
    """Step to the end; tokens by request and index, the books checked after every step."""
    tokens = {} if tokens is None else tokens
    for _ in range(50_000):
        if not core.has_work:
            assert core.stats().kv_usage == 0.0
            return tokens
        step(core, tokens)
    raise AssertionError("no progress")


def step(core: EngineCore, tokens: dict[tuple[str, int], list[int]]) -> None:
    for output in core.step():
        tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    core.scheduler.check_integrity()


def run_all(core: EngineCore, expected: Expected, n: int = 1) -> None:
    """Give the core all prompts at once, and hold it to the outputs."""
    for number, prompt in enumerate(expected.prompts):
        assert core.submit(request(str(number), prompt, n)) is None
    tokens = drain(core)
    for number, output in enumerate(expected.outputs):
        for index in range(n):
            assert tokens[str(number), index] == output


def test_at_every_chunk_size_from_1_to_64(expected: Expected, backend: str) -> None:
    loaded = load_tiny(expected.folder, backend, blocks=64)
    longest = max(range(12), key=lambda number: len(expected.prompts[number]))
    for chunk in range(1, 65):
        core = core_of(loaded, batch=1, budget=chunk, prefix_caching=False)
        core.submit(request("r", expected.prompts[longest]))
        assert drain(core) == {("r", 0): expected.outputs[longest]}, f"chunks of {chunk}"


def test_through_prefix_hits(expected: Expected, backend: str) -> None:
    core = core_of(load_tiny(expected.folder, backend, blocks=400))
    run_all(core, expected)
    before = core.stats().prefix_hit_tokens
    run_all(core, expected)
    assert core.stats().prefix_hit_tokens - before > 300


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_by_recompute_on_a_pool_of_a_quarter_of_the_demand(
    expected: Expected, backend: str, prefix_caching: bool
) -> None:
    demand = sum(-(-(len(prompt) + NEW_TOKENS) // 4) for prompt in expected.prompts)
    loaded = load_tiny(expected.folder, backend, blocks=demand // 4)
    core = core_of(loaded, batch=12, prefix_caching=prefix_caching)
    run_all(core, expected)
    assert 0 < core.stats().preemptions <= 60
    assert core.stats().swapped_out_blocks == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_by_swap(expected: Expected, backend: str, prefix_caching: bool) -> None:
    loaded = load_tiny(
        expected.folder, backend, blocks=28, swap_space_gb=200 * gib_of_a_block(expected.folder, backend)
    )
    # Copies that give time back: always swap, whatever this machine's clock says of so small a model.
    core = core_of(loaded, batch=12, prefix_caching=prefix_caching, block_copy_seconds=-1.0)
    run_all(core, expected)
    stats = core.stats()
    assert stats.preemptions > 0
    assert stats.swapped_in_blocks > 0


def test_evicted_to_host_memory_and_disk_and_brought_back(expected: Expected, backend: str, tmp_path: Path) -> None:
    gib = gib_of_a_block(expected.folder, backend)
    offload = {"host_memory_gb": 40 * gib, "disk_path": str(tmp_path), "disk_gb": 1000 * gib}
    loaded = load_tiny(expected.folder, backend, blocks=30, offload=offload)
    core = core_of(loaded, batch=3)
    for _ in range(3):
        run_all(core, expected)
    events = core.stats().offloaded_blocks
    assert events["returned"] > 20
    assert events["written"] > 0
    assert events["failed_reads"] == 0

    again = core_of(
        load_tiny(expected.folder, backend, blocks=30, offload=offload)
    )  # another process would do the same
    run_all(again, expected)
    assert again.stats().offloaded_blocks["read"] > 0


def test_blocks_of_another_model_in_the_same_folder_are_never_used(expected: Expected, tmp_path: Path) -> None:
    """The other one has the same shape, and lies where the first one lay: only its bytes tell."""
    gib = gib_of_a_block(expected.folder, "reference")
    offload = {"host_memory_gb": 40 * gib, "disk_path": str(tmp_path / "disk"), "disk_gb": 1000 * gib}
    other = save_tiny_model(tmp_path / "model", seed=1)
    core = core_of(load_tiny(other, "reference", blocks=30, offload=offload), batch=3)
    for number, prompt in enumerate(expected.prompts):
        core.submit(request(str(number), prompt))
    drain(core)
    assert list((tmp_path / "disk").glob("*/*.kv"))
    for file in expected.folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    core = core_of(load_tiny(other, "reference", blocks=30, offload=offload), batch=3)
    run_all(core, expected)
    assert core.stats().offloaded_blocks["read"] == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_several_answers_are_each_what_one_is(expected: Expected, backend: str, prefix_caching: bool) -> None:
    core = core_of(load_tiny(expected.folder, backend, blocks=120), prefix_caching=prefix_caching)
    run_all(core, expected, n=3)


@pytest.mark.parametrize("seed", range(6))
def test_on_random_schedules_of_all_of_it_beside_neighbours_that_are_cancelled(
    expected: Expected, backend: str, seed: int, tmp_path: Path
) -> None:
    random, gib = Random(seed), gib_of_a_block(expected.folder, backend)
    loaded = load_tiny(
        expected.folder,
        backend,
        blocks=random.randint(28, 60),
        swap_space_gb=random.choice((0, 60)) * gib,
        offload={"host_memory_gb": 30 * gib, "disk_path": str(tmp_path), "disk_gb": 300 * gib},
    )
    copy_seconds = random.choice((-1.0, 1.0))
    core = core_of(loaded, batch=random.randint(2, 12), budget=random.randint(12, 70), block_copy_seconds=copy_seconds)
    tokens: dict[tuple[str, int], list[int]] = {}
    wanted: dict[tuple[str, int], list[int]] = {}
    neighbours: list[str] = []
    for turn in range(40):
        number, n = random.randrange(12), random.choice((1, 1, 2, 3))
        assert core.submit(request(f"{turn}", expected.prompts[number], n)) is None
        wanted |= {(f"{turn}", index): expected.outputs[number] for index in range(n)}
        if random.random() < 0.4:
            prompt = [*expected.prompts[random.randrange(12)], 5]
            core.submit(request(f"neighbour {turn}", prompt, random.choice((1, 3)), max_tokens=60))
            neighbours.append(f"neighbour {turn}")
        for _ in range(random.randint(0, 12)):
            step(core, tokens)
        if neighbours and random.random() < 0.5:
            core.abort(neighbours.pop(random.randrange(len(neighbours))))
    drain(core, tokens)
    assert {key: tokens[key] for key in wanted} == wanted


def test_a_seed_gives_the_same_tokens_in_any_company(expected: Expected, backend: str) -> None:
    """Alone, beside requests with and without seeds in any order, and as one of several answers."""
    loaded = load_tiny(expected.folder, backend, blocks=400)
    prompt = expected.prompts[3]

    def ask(neighbours: int = 0, n: int = 1, order: int = 0) -> dict[int, list[int]]:
        core = core_of(loaded, batch=12, budget=64)
        mine = GenerationRequest("a", prompt, 24, SamplingParams(seed=1234), ignore_eos=True, n=n)
        others = [
            GenerationRequest(f"{one}", expected.prompts[one], 30, SamplingParams(seed=Random(one).getrandbits(63)))
            for one in range(neighbours)
        ]
        together = [mine, *others]
        Random(order).shuffle(together)
        for one in together:
            assert core.submit(one) is None
        return {index: tokens for (name, index), tokens in drain(core).items() if name == "a"}

    alone = ask()[0]
    assert all(ask()[0] == alone for _ in range(3))
    assert all(ask(neighbours=1, order=order)[0] == alone for order in range(3))
    assert all(ask(neighbours=7, order=order)[0] == alone for order in range(5))
    three = ask(n=3)
    assert three[0] == alone
    assert three == ask(n=3, neighbours=5)
    assert len({tuple(tokens) for tokens in three.values()}) == 3
