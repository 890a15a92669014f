"""Who loses their blocks when the pool is exhausted: by `priority` and by tier the lowest, and nobody without end."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from stepping import Answers, Clock, make_core, request, run, step

from paceline_server.engine.interface import Tier
from paceline_server.engine.queue import MAX_LOSSES
from paceline_server.engine.testing import expected_tokens

TIERS = list(Tier)
LEVELS = {
    "priority": lambda one: one.request.priority,
    "slo": lambda one: TIERS.index(one.request.tier),
    "fcfs": lambda one: 0,
    "sjf": lambda one: 0,
}

arrivals = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 12), st.integers(1, 20)), min_size=2, max_size=14
)


def ask(core, name, level, prompt, output):
    tokens = [1 + int(name) % 200] * prompt
    core.submit(request(name, tokens, output, priority=level, tier=TIERS[level]))
    return expected_tokens(tokens, output)


def watched_step(core, level):
    """The outputs of a step. Who has lost its blocks in it ranked lowest of those who could."""
    running = [(one, one.preemptions) for one in core.scheduler.running]
    outputs = step(core)
    kept = [one for one, before in running[1:] if one.preemptions == before < MAX_LOSSES]
    for victim, before in running:
        if victim.preemptions > before:
            assert victim is not running[0][0], "the first keeps its blocks"
            assert before >= MAX_LOSSES or all(level(one) <= level(victim) for one in kept)
    return outputs


@settings(max_examples=120)
@given(arrivals=arrivals, batch=st.integers(2, 6), pool=st.integers(8, 16), caching=st.booleans())
@pytest.mark.parametrize("policy", LEVELS)
def test_nobody_is_preempted_for_one_that_ranks_below_it_but_for_the_first_and_those_that_have_lost_enough(
    policy, arrivals, batch, pool, caching
):
    """Time stands still: nobody ages, and nobody is late."""
    core, _ = make_core(
        batch=batch, budget=16, num_blocks=pool, block_size=4, policy=policy, prefix_caching=caching, clock=Clock()
    )
    answers, wanted = Answers(), {}
    for number, (pause, level, prompt, output) in enumerate(arrivals):
        wanted[str(number)] = ask(core, str(number), level, prompt, output)
        for _ in range(pause):
            answers.take(watched_step(core, LEVELS[policy]))
    for _ in range(2_000):
        if core.has_work:
            answers.take(watched_step(core, LEVELS[policy]))
    assert answers.tokens == wanted


@settings(max_examples=100)
@example(batch=4, budget=4, pool=12, low=(13, 11), high=(3, 12))  # preempted for ever, were it not spared in the end
@example(batch=3, budget=8, pool=12, low=(20, 10), high=(4, 20))  # likewise, were it passed while it waits
@given(
    batch=st.integers(2, 6),
    budget=st.integers(6, 12),
    pool=st.integers(8, 16),
    low=st.tuples(st.integers(1, 20), st.integers(1, 11)),
    high=st.tuples(st.integers(1, 12), st.integers(1, 20)),
)
@pytest.mark.parametrize("policy", ["priority", "slo"])
def test_one_of_the_lowest_rank_finishes_though_a_flood_ranks_above_it(policy, batch, budget, pool, low, high):
    """Time hardly passes, so that what waits does not age; nothing is cached, so that what is lost is work."""
    clock = Clock()
    options = {"num_blocks": pool, "block_size": 4, "policy": policy, "prefix_caching": False}
    core, _ = make_core(batch=batch, budget=budget, clock=clock, **options)
    ask(core, "0", 0, 4, high[1])
    core.step()
    ask(core, "1", 2, *low)
    (victim,) = core.scheduler.waiting
    core.step()
    assume(victim in core.scheduler.running)
    number, steps = 2, 0
    while victim.num_output < low[1]:
        while len(core.scheduler.waiting) < 4:
            ask(core, str(number), 0, *high)
            number += 1
        step(core)
        clock.now += 0.001
        steps += 1
        assert steps < 2_000, "it is starved"
    assert victim.preemptions <= MAX_LOSSES + 2


def test_the_order_of_arrival_alone_ranks_nobody():
    core, _ = make_core(batch=4, budget=16, num_blocks=8, block_size=4, policy="fcfs")
    for number in range(4):
        ask(core, str(number), 2 - min(number, 2), 4, 24)
    core.step()
    assert [one.request_id for one in core.scheduler.running] == ["0", "1", "2", "3"]
    run(core)
