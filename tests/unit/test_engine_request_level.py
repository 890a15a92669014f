"""Batches by request on the step loop: the same tokens as continuous batching, another order of work."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import Clock, request, run, step

from paceline_server.config import parse
from paceline_server.engine.batchers import Batcher, Batching
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, expected_tokens, model_info
from paceline_server.errors import InvalidConfiguration

STATIC = Batching(Batcher.STATIC)
PADDED = Batching(Batcher.STATIC, packed=False)
DYNAMIC = Batching(Batcher.DYNAMIC)


def make_core(batching, *, batch=4, budget=32, clock=None, **info):
    model = model_info(**info)
    runner = FakeRunner(model)
    return EngineCore(runner, model, SchedulerLimits(batch, budget), batching=batching, clock=clock or Clock()), runner


@settings(max_examples=60)
@given(
    batching=st.sampled_from([DYNAMIC, STATIC, PADDED]),
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=14),
    batch=st.integers(1, 5),
    num_blocks=st.integers(6, 40),
    policy=st.sampled_from(["slo", "fcfs", "sjf"]),
)
def test_every_batcher_gives_everybody_the_tokens_it_gets_alone(batching, sizes, batch, num_blocks, policy):
    core, runner = make_core(batching, batch=batch, budget=16, num_blocks=num_blocks)
    for number, (length, count) in enumerate(sizes):
        assert core.submit(request(str(number), [number + 1] * length, count)) is None
    tokens, ends = run(core)
    assert tokens == {
        str(number): expected_tokens([number + 1] * length, count) for number, (length, count) in enumerate(sizes)
    }
    assert ends.keys() == tokens.keys()
    assert all(step.num_tokens <= 16 for step in runner.batches)
    assert core.stats().kv_usage == 0.0


def test_nobody_enters_before_the_last_one_of_a_batch_has_left():
    core, runner = make_core(DYNAMIC, batch=2)
    for name, count in (("long", 6), ("short", 1), ("next", 1)):
        core.submit(request(name, [1], count))
    _, ends = run(core)
    assert list(ends) == ["short", "long", "next"]
    assert [len(step.slices) for step in runner.batches] == [2, 1, 1, 1, 1, 1, 1]


def test_a_static_batch_keeps_its_size_and_answers_with_its_longest_member():
    core, runner = make_core(STATIC, batch=2)
    for name, count in (("long", 6), ("short", 1), ("next", 1)):
        core.submit(request(name, [1], count))
    _, ends = run(core)
    assert list(ends) in (["long", "short", "next"], ["short", "long", "next"])
    assert [len(step.slices) for step in runner.batches] == [2, 2, 2, 2, 2, 2, 1]
    assert core.scheduler.totals.held_tokens == 5


def test_the_last_token_of_a_held_member_comes_with_the_end_of_its_batch():
    core, _ = make_core(STATIC, batch=2)
    core.submit(request("long", [1], 3))
    core.submit(request("short", [2], 1))
    steps = [[(one.request_id, one.finish) for one in step(core)] for _ in range(3)]
    assert steps[0] == [("long", None)]
    assert steps[1] == [("long", None)]
    assert dict(steps[2]) == {"long": FinishReason.LENGTH, "short": FinishReason.LENGTH}


def test_padding_brings_every_prompt_of_a_batch_to_the_longest():
    core, runner = make_core(PADDED, batch=3)
    for name, length in (("a", 7), ("b", 2), ("c", 4)):
        core.submit(request(name, [3] * length, 2))
    run(core)
    assert runner.batches[0].num_tokens == 3 * 7
    assert core.scheduler.totals.padded_tokens == 5 + 3


def test_padding_counts_in_the_token_budget():
    core, runner = make_core(PADDED, batch=3, budget=12)
    for name, length in (("a", 7), ("b", 2)):
        core.submit(request(name, [3] * length, 1))
    run(core)
    assert [step.num_tokens for step in runner.batches] == [7, 2]


@pytest.mark.parametrize("batching", [DYNAMIC, STATIC, PADDED], ids=["dynamic", "static", "padded"])
def test_a_prompt_of_more_than_the_budget_is_refused_for_good_and_by_the_settings_name(batching):
    core, _ = make_core(batching, budget=8)
    refusal = core.submit(request("a", [1] * 9))
    assert "max_tokens_in_batch" in refusal.message
    assert refusal.retry_after is None
    assert not core.has_work


def test_a_member_whose_client_goes_away_leaves_and_the_rest_goes_on():
    core, _ = make_core(STATIC, batch=3)
    for name, count in (("a", 6), ("b", 6), ("short", 1)):
        core.submit(request(name, [1], count))
    step(core)
    core.abort("a")
    core.abort("short")  # ended already, but held
    core.scheduler.check_integrity()
    _, ends = run(core)
    assert list(ends) == ["b"]


def test_the_ends_of_a_batch_are_told_when_its_last_member_is_aborted():
    core, _ = make_core(STATIC, batch=2)
    core.submit(request("gone", [1], 6))
    core.submit(request("short", [2], 1))
    step(core)
    core.abort("gone")
    assert [(one.request_id, one.finish) for one in step(core)] == [("short", FinishReason.LENGTH)]
    assert not core.has_work


def test_a_request_whose_timeout_is_over_ends_waiting_or_running():
    clock = Clock()
    core, _ = make_core(DYNAMIC, batch=1, clock=clock)
    core.submit(request("running", [1], 50, timeout=2.0))
    core.submit(request("waiting", [1], 50, timeout=1.0))
    step(core)
    clock.now += 3.0
    assert [(one.request_id, one.finish) for one in step(core)] == [
        ("waiting", FinishReason.TIMEOUT),
        ("running", FinishReason.TIMEOUT),
    ]
    assert not core.has_work


@pytest.mark.parametrize("batching", [DYNAMIC, STATIC, PADDED], ids=["dynamic", "static", "padded"])
def test_a_batch_fits_the_pool_even_if_every_answer_becomes_as_long_as_it_may(batching):
    core, _ = make_core(batching, batch=4, num_blocks=9)
    for name in "abcd":
        core.submit(request(name, [1] * 4, 12))  # four blocks of four tokens each
    step(core)
    assert len(core.scheduler.running) == 2
    assert run(core)[0].keys() == set("abcd")
    assert core.stats().preemptions == 0


def test_an_idle_engine_waits_for_company_and_a_full_batch_starts_at_once():
    clock = Clock()
    core, runner = make_core(Batching(Batcher.STATIC, max_delay=0.5), batch=2, clock=clock)
    core.submit(request("a", [1], 1))
    assert core.due_in() == 0.5
    assert step(core) == []
    core.submit(request("b", [2], 1))
    assert core.due_in() == 0.0
    assert len(step(core)) == 2
    assert len(runner.batches) == 1
    assert core.due_in() is None


def test_the_wait_of_a_continuous_engine_ends_at_the_cap_and_none_is_made_while_it_runs():
    clock = Clock()
    core, _ = make_core(Batching(max_delay=0.5), batch=4, clock=clock)
    for number in range(2):
        core.submit(request(str(number), [1], 4))
        clock.now += 0.2
    assert core.due_in() == pytest.approx(0.1)
    clock.now += 0.2
    step(core)
    core.submit(request("late", [1], 4))
    assert core.due_in() == 0.0
    assert len(run(core)[1]) == 3


@pytest.mark.parametrize(
    ("batching", "kind"),
    [
        ({}, "continuous"),
        ({"enable_continuous_batching": True}, "continuous"),
        ({"enable_continuous_batching": False}, "dynamic"),
        ({"enable_continuous_batching": False, "batcher": "static", "packed": False}, "static"),
        ({"batcher": "dynamic"}, "dynamic"),
    ],
)
def test_two_settings_name_the_batcher(batching, kind):
    assert parse({"engine": {"model_path": "m"}, "batching": batching}).batching.kind == kind


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"batching": {"batcher": "continuous", "enable_continuous_batching": False}}, "batcher"),
        ({"batching": {"batcher": "static", "enable_continuous_batching": True}}, "batcher"),
        ({"batching": {"batcher": "dynamic", "packed": False}}, "packed"),
        ({"batching": {"batcher": "dynamic"}, "scheduling": {"admission": "target"}}, "admission"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(groups, named):
    with pytest.raises(InvalidConfiguration, match=named):
        parse({"engine": {"model_path": "m"}} | groups)
