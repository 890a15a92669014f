"""Among equals the one of whose prompt most is cached goes first, and each is overtaken a bounded number of times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import GenerationRequest, Tier
from paceline_server.engine.policies import ttft_targets, waiting_line
from paceline_server.engine.preference import MAX_OVERTAKEN
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.testing import FakeRunner, model_info

TTFT = ttft_targets(SchedulingConfig().tiers)[Tier.STANDARD]

numbers = iter(range(1, 1 << 60))


def line_of(cached):
    """A line of `slo`; `cached` has the cached tokens by name."""
    return waiting_line(SchedulingConfig(), lambda one: cached.get(one.request_id, 0))


def push(line, name, arrival=0.0, **options):
    one = Sequence(GenerationRequest(name, (1,) * 4, 4, **options), arrival, 4, number=next(numbers))
    line.push(one, arrival)
    return one


def drain(line, now):
    order = []
    while (one := line.take(now)) is not None:
        order.append(one.request_id)
    return order


@pytest.mark.parametrize("now", [0.02, 2.0], ids=["in time", "late"])
def test_of_equals_the_one_goes_first_of_which_most_is_cached(now):
    line = line_of({"second": 16, "third": 32})
    for name, arrival in (("first", 0.0), ("second", 0.01), ("third", 0.02)):
        push(line, name, arrival)
    assert drain(line, now) == ["third", "second", "first"]


@pytest.mark.parametrize("count", [60, 100, 150])
def test_very_many_that_become_late_at_once_are_all_served(count):
    line = line_of({})
    for number in range(count):
        push(line, str(number))
    assert sorted(drain(line, 2.0), key=int) == [str(number) for number in range(count)]


def test_what_is_due_much_later_is_no_equal():
    line = line_of({"later": 64})
    push(line, "first", 0.0)
    push(line, "later", 0.3 * TTFT)
    assert drain(line, 0.3 * TTFT) == ["first", "later"]


def test_a_cached_prefix_takes_nobody_past_a_more_urgent_tier_or_a_tenant_that_has_used_less():
    line = line_of({"batch": 64, "greedy": 64})
    push(line, "batch", tier=Tier.BATCH)
    push(line, "standard")
    assert drain(line, 0.0) == ["standard", "batch"]
    greedy = push(line, "greedy", tenant="b")
    line.charge(greedy, 10_000.0)
    push(line, "modest", tenant="a")
    assert drain(line, 0.0) == ["modest", "greedy"]


def test_a_stream_of_cached_prompts_overtakes_one_that_is_not_a_few_times_and_no_more():
    cached: dict[str, int] = {}
    line = line_of(cached)
    push(line, "patient")
    taken = []
    for number in range(3 * MAX_OVERTAKEN):
        cached[str(number)] = 64
        push(line, str(number), 0.001 * number)
        taken.append(line.take(0.001 * number).request_id)
    assert taken.index("patient") == MAX_OVERTAKEN


arrivals = st.lists(st.tuples(st.sampled_from([0.0, 0.002, 0.01]), st.integers(0, 3), st.integers(0, 2)), max_size=40)


@given(arrivals)
def test_nobody_is_overtaken_more_often_than_the_bound_or_by_any_but_an_equal(arrivals):
    cached: dict[str, int] = {}
    line, now, taken = line_of(cached), 0.0, []
    waiting: list[Sequence] = []
    overtaken: dict[str, int] = {}
    for gap, blocks, takes in [*arrivals, (0.0, 0, len(arrivals) + 1)]:
        now += gap
        name = str(len(cached))
        cached[name] = 16 * blocks
        waiting.append(push(line, name, now))
        for _ in range(takes):
            one = line.take(now)
            if one is None:
                break
            place = waiting.index(one)
            assert place == 0 or one.arrival - waiting[0].arrival <= 0.25 * TTFT + 1e-9
            for before in waiting[:place]:
                assert cached[before.request_id] < cached[one.request_id]
                overtaken[before.request_id] = overtaken.get(before.request_id, 0) + 1
            taken.append(waiting.pop(place))
    assert not waiting
    assert len(taken) == len(cached)
    assert max(overtaken.values(), default=0) <= MAX_OVERTAKEN


@given(st.lists(st.integers(0, 400), max_size=30), st.sampled_from([0, 48]))
def test_the_order_is_that_of_the_deadlines_where_as_much_is_cached_of_each(milliseconds, tokens):
    line = line_of({str(number): tokens for number in range(len(milliseconds))})
    for number, arrival in enumerate(milliseconds):
        push(line, str(number), arrival / 1e3)
    in_order = sorted(range(len(milliseconds)), key=lambda number: milliseconds[number])
    assert drain(line, 0.4) == [str(number) for number in in_order]


@pytest.mark.parametrize(("policy", "first"), [("slo", "known"), ("fcfs", "unknown")])
def test_a_prompt_whose_blocks_are_in_the_cache_is_computed_before_one_that_came_with_it(policy, first):
    info = model_info()
    scheduling = SchedulingConfig(policy=policy)
    core = EngineCore(FakeRunner(info), info, SchedulerLimits(1, 16), scheduling, clock=lambda: 0.0)
    core.submit(GenerationRequest("earlier", (7,) * 12, 1))
    core.step()
    core.submit(GenerationRequest("unknown", (9,) * 12, 1))
    core.submit(GenerationRequest("known", (7,) * 12, 1))
    assert [output.request_id for output in core.step()] == [first]
