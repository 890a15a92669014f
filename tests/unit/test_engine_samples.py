"""Several answers to one prompt: the prompt is computed and held once, each answer is what it would be alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server.engine import sequence
from paceline_server.engine.batch import CopyKind, SamplingParams
from paceline_server.engine.batchers import Batcher, Batching
from paceline_server.engine.blocks import chain_hash
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason, GenerationRequest
from paceline_server.engine.samples import split
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, expected_tokens, model_info

PROMPT = list(range(1, 15))  # three full blocks of four, and half of one


def make_core(*, batch=4, prefix_caching=True, **info):
    model = model_info(**info)
    runner = FakeRunner(model)
    return EngineCore(runner, model, SchedulerLimits(batch, 64), prefix_caching=prefix_caching), runner


def request(name="a", prompt=PROMPT, max_tokens=6, n=3, **options):
    return GenerationRequest(name, prompt, max_tokens, ignore_eos=True, n=n, **options)


def run(core):
    """Step to the end; returns tokens by request and index, books checked after every step."""
    tokens: dict[tuple[str, int], list[int]] = {}
    ended: set[tuple[str, int]] = set()
    for _ in range(3_000):
        if not core.has_work:
            assert core.stats().kv_usage == 0.0
            return tokens, ended
        for output in core.step():
            key = output.request_id, output.index
            assert key not in ended, "output after the end"
            tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish is not None:
                ended.add(key)
        core.scheduler.check_integrity()
    raise AssertionError("no progress")


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:12], PROMPT[:13], PROMPT[:1]], ids=len)
def test_each_answer_is_what_a_request_alone_gets_and_the_prompt_is_computed_once(prefix_caching, prompt):
    core, runner = make_core(prefix_caching=prefix_caching)
    core.submit(request(prompt=prompt))
    tokens, ended = run(core)
    assert tokens == {("a", index): expected_tokens(prompt, 6) for index in range(3)}
    assert len(ended) == 3
    computed = sum(batch.num_tokens for batch in runner.batches)
    assert computed == len(prompt) + 3 * (6 - 1) + 2, "two answers compute the prompt's last token anew, nothing else"


def test_the_answers_share_the_prompts_full_blocks_and_copy_the_last_one():
    core, runner = make_core(num_blocks=16)
    core.submit(request(n=4))
    core.step()
    assert core.stats().running == 1, "the others wait for the prompt"
    core.step()
    tables = [sequence.block_table for sequence in core.scheduler.running]
    assert len(tables) == 4
    assert len({tuple(table[:3]) for table in tables}) == 1, "three shared blocks"
    assert len({table[3] for table in tables}) == 4, "each writes to a block of its own"
    assert [copy.kind for copy in runner.batches[1].copies] == [CopyKind.WITHIN] * 3


def test_the_blocks_of_a_prompt_are_hashed_once_for_all_its_answers(monkeypatch):
    hashed = []
    monkeypatch.setattr(
        sequence, "chain_hash", lambda parent, tokens: hashed.append(tuple(tokens)) or chain_hash(parent, tokens)
    )
    core, _ = make_core(batch=8)
    core.submit(request(n=8, max_tokens=6))
    run(core)
    blocks = [tuple(PROMPT[start : start + 4]) for start in (0, 4, 8)]
    assert [hashed.count(block) for block in blocks] == [1, 1, 1]


def test_a_request_for_several_answers_waits_as_one_and_until_the_first_of_them_runs():
    core, _ = make_core(batch=2)
    core.submit(request("a", n=16))
    assert core.stats().waiting == 1
    core.step()
    assert (core.stats().running, core.stats().waiting) == (1, 0), "the others wait for the prompt"
    core.step()
    assert (core.stats().running, core.stats().waiting) == (2, 0), "the others wait for slots"
    core.submit(request("b", n=16))
    core.submit(request("c", n=1))
    assert core.stats().waiting == 2


def test_sample_i_is_drawn_with_the_seed_plus_i():
    seeds = [one.sampling.seed for one in split(request(sampling=SamplingParams(seed=(1 << 63) - 1)))]
    assert seeds == [(1 << 63) - 1, 0, 1]
    assert split(request(n=1)) == [request(n=1)]


def test_an_abort_of_the_request_stops_all_answers_at_any_time():
    for steps in range(1, 9):
        core, _ = make_core(batch=3)
        core.submit(request(n=4, max_tokens=9))
        for _ in range(steps):
            core.step()
            core.scheduler.check_integrity()
        core.abort("a")
        core.abort("a")  # a second time is no error
        core.scheduler.check_integrity()
        assert not core.has_work
        assert core.stats().kv_usage == 0.0
        assert len(core._samples) == 0, "the request's record must go with it"


def test_an_answer_that_is_cut_gives_back_only_its_own_blocks():
    core, _ = make_core()
    core.submit(request(max_tokens=20))
    for _ in range(3):
        core.step()
    held = core.stats().kv_usage
    core.abort("a", 1)
    core.abort("a", 1)
    core.scheduler.check_integrity()
    assert 0 < core.stats().kv_usage < held
    tokens, ended = run(core)
    assert ended == {("a", 0), ("a", 2)}
    assert ("a", 1) not in tokens


def test_when_the_first_answer_is_cut_before_its_prompt_is_computed_the_others_go_on():
    core, _ = make_core()
    core.submit(request())
    core.abort("a", 0)
    tokens, ended = run(core)
    assert tokens == {("a", index): expected_tokens(PROMPT, 6) for index in (1, 2)}
    assert ended == {("a", 1), ("a", 2)}


def test_an_answer_that_is_cut_before_it_enters_never_runs():
    core, _ = make_core()
    core.submit(request())
    core.abort("a", 2)
    tokens, _ = run(core)
    assert set(tokens) == {("a", 0), ("a", 1)}


def test_answers_of_one_token_and_ends_by_timeout_leave_no_record():
    now = [0.0]
    info = model_info()
    core = EngineCore(FakeRunner(info), info, SchedulerLimits(2, 64), clock=lambda: now[0])
    core.submit(request("short", max_tokens=1))
    core.submit(request("late", max_tokens=50, timeout=5.0))
    ends = {}
    while core.has_work:
        for output in core.step():
            if output.finish is not None:
                ends[output.request_id, output.index] = output.finish
        core.scheduler.check_integrity()
        now[0] += 1.0
    assert {ends["short", index] for index in range(3)} == {FinishReason.LENGTH}
    assert {ends["late", index] for index in range(3)} == {FinishReason.TIMEOUT}
    assert len(core._samples) == 0


@pytest.mark.parametrize("batcher", [Batcher.DYNAMIC, Batcher.STATIC])
def test_batchers_by_request_answer_several_times_too(batcher):
    info = model_info()
    core = EngineCore(FakeRunner(info), info, SchedulerLimits(2, 64), batching=Batching(batcher))
    core.submit(request())
    tokens, _ = run(core)
    assert tokens == {("a", index): expected_tokens(PROMPT, 6) for index in range(3)}


def test_200_rounds_of_streams_closed_at_odd_moments_leave_the_pool_and_the_records_as_they_were():
    core, _ = make_core(batch=6, num_blocks=48, swap_slots=12)
    for round_ in range(200):
        name = str(round_)
        core.submit(request(name, PROMPT[: 2 + round_ % 12], max_tokens=8, n=1 + round_ % 5))
        for _ in range(round_ % 4):
            core.step()
            core.scheduler.check_integrity()
        if round_ % 3:
            core.abort(name, round_ % 5)
        if round_ % 2:
            core.abort(name)
    run(core)
    assert len(core._samples) == 0
    assert not core._samples._places
    assert core.scheduler.blocks.num_free == 48


@settings(max_examples=150)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 14), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6
    ),
    pool=st.integers(7, 16),
    slots=st.integers(0, 12),
    caching=st.booleans(),
)
def test_forks_preemptions_and_swaps_are_invisible_in_the_answers(requests, pool, slots, caching):
    core, _ = make_core(batch=5, num_blocks=pool, swap_slots=slots, prefix_caching=caching)
    expected = {}
    for number, (n, length, output, steps) in enumerate(requests):
        name, prompt = str(number), [number % 3 + 1, *PROMPT[1:length]]
        core.submit(request(name, prompt, output, n))
        expected |= {(name, index): expected_tokens(prompt, output) for index in range(n)}
        got = [core.step() for _ in range(steps)]
        for outputs in got:
            for one in outputs:
                del expected[one.request_id, one.index][: len(one.token_ids)]
    tokens, _ = run(core)
    assert {key: tokens.get(key, []) for key in expected} == expected
