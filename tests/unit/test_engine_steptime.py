"""What steps cost, learned from steps; and the size of a chunk of prompt that follows from it."""

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.engine.interface import GenerationRequest, Tier
from paceline_server.engine.pacing import MIN_CHUNK, Pacer, Prefill, divide
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.steptime import StepShape, StepTimeModel, pairs_of

FIXED, BY_TOKEN, BY_PAIR = 0.008, 3e-5, 4e-8


def cost(shape, scale=1.0):
    return scale * (FIXED + BY_TOKEN * shape.tokens + BY_PAIR * shape.pairs)


def decode_step(random):
    return StepShape.of((random.randrange(10, 2_000), 1) for _ in range(random.randrange(1, 60)))


def mixed_step(random):
    chunk = (random.randrange(0, 2_000), random.randrange(2, 500))
    return StepShape.of([chunk, *((random.randrange(10, 2_000), 1) for _ in range(random.randrange(0, 60)))])


def trained(random, steps=60, noise=0.0):
    model = StepTimeModel()
    for _ in range(steps):
        for shape in (decode_step(random), mixed_step(random)):
            model.observe(shape, cost(shape) * random.gauss(1.0, noise))
    return model


def test_a_shape_counts_every_token_and_every_pair_once():
    shape = StepShape.of([(0, 3), (10, 1)])
    assert (shape.tokens, shape.pairs, shape.prefills) == (4, 1 + 2 + 3 + 11, True)
    assert not StepShape.of([(7, 1), (8, 1)]).prefills
    assert pairs_of(5, 2) == 6 + 7


@given(st.integers(0, 1_000))
def test_it_finds_the_three_costs_of_a_linear_machine(seed):
    random = Random(seed)
    model = trained(random)
    for shape in (decode_step(random), mixed_step(random)):
        assert model.seconds(shape.tokens, shape.pairs) == pytest.approx(cost(shape), rel=0.02)


def test_noise_of_a_tenth_leaves_it_within_a_tenth():
    random = Random(1)
    model = trained(random, steps=200, noise=0.1)
    shape = mixed_step(random)
    assert model.seconds(shape.tokens, shape.pairs) == pytest.approx(cost(shape), rel=0.1)


def test_a_thousand_steps_without_a_prompt_do_not_make_it_forget_what_prompts_cost():
    random = Random(2)
    model = trained(random)
    same = StepShape.of([(100, 1)] * 8)
    for _ in range(1_000):
        model.observe(same, cost(same))
    shape = StepShape.of([(0, 400)])
    assert model.seconds(shape.tokens, shape.pairs) == pytest.approx(cost(shape), rel=0.1)


def test_a_machine_that_has_become_twice_as_slow_is_noticed():
    random = Random(3)
    model = trained(random)
    for _ in range(150):
        for shape in (decode_step(random), mixed_step(random)):
            model.observe(shape, cost(shape, 2.0))
    shape = mixed_step(random)
    assert model.seconds(shape.tokens, shape.pairs) == pytest.approx(cost(shape, 2.0), rel=0.1)


def test_one_pause_of_a_second_changes_little():
    random = Random(4)
    model = trained(random)
    shape = decode_step(random)
    model.observe(shape, 1.0)
    assert model.seconds(shape.tokens, shape.pairs) < 1.5 * cost(shape)


def test_no_cost_is_ever_negative():
    model = StepTimeModel()
    for tokens, seconds in ((100, 0.01), (50, 0.02), (10, 0.04), (1, 0.05)):
        model.observe(StepShape(tokens, tokens, prefills=True), seconds)
    assert min(model.coefficients) >= 0.0
    assert model.seconds(1_000_000, 0) >= 0.0


def test_where_one_cost_would_come_out_negative_the_others_are_fitted_without_it():
    model, random = StepTimeModel(), Random(8)
    for _ in range(200):
        tokens = random.randrange(2, 400)
        pairs = tokens * random.randrange(1, 50)
        model.observe(StepShape(tokens, pairs, prefills=True), 0.01 + 1e-4 * tokens - 1e-7 * pairs)
    assert model.coefficients[2] == 0.0
    assert model.seconds(200, 5_000) == pytest.approx(0.01 + 1e-4 * 200 - 1e-7 * 5_000, rel=0.1)


def sequence(tokens, tier):
    return Sequence(GenerationRequest("r", (1,) * tokens, 8, tier=tier), 0.0, 8)


TARGETS = {Tier.INTERACTIVE: 0.0085, Tier.STANDARD: 0.05}  # the first is missed by decoding alone


@given(
    tiers=st.lists(st.sampled_from(list(Tier)), max_size=30),
    position=st.integers(0, 3_000),
    budget=st.integers(1, 1_000),
    context=st.integers(1, 500),
)
def test_a_step_with_the_chunk_stays_within_the_strictest_target_and_one_token_more_would_not(
    tiers, position, budget, context
):
    model = trained(Random(5))
    chunk = Pacer(model, TARGETS).prefill_tokens([sequence(context, tier) for tier in tiers], position, budget)
    targets = [TARGETS[tier] for tier in tiers if tier in TARGETS]
    assert 1 <= chunk <= budget
    if not targets:
        assert chunk == budget
        return

    def seconds(tokens):
        return model.seconds(len(tiers) + tokens, len(tiers) * context + tokens * position + tokens**2 / 2)

    assert chunk in (budget, MIN_CHUNK) or seconds(chunk) <= min(targets) * (1 + 1e-9)
    assert chunk == budget or seconds(chunk + 1) > min(targets) * (1 - 1e-9)


def test_before_steps_are_known_the_chunk_is_the_whole_budget():
    assert Pacer(StepTimeModel(), TARGETS).prefill_tokens([sequence(5, Tier.INTERACTIVE)], 0, 300) == 300


@given(
    remaining=st.lists(st.integers(1, 5_000), min_size=1, max_size=8),
    waiting=st.one_of(st.just(inf), st.integers(1, 5_000)),
    budget=st.integers(0, 1_000),
)
def test_a_step_is_divided_so_that_the_first_prompt_gets_half_of_it_and_nothing_is_wasted(remaining, waiting, budget):
    counts = divide(budget, [Prefill(one) for one in remaining], waiting)
    assert all(0 <= count <= one for count, one in zip(counts, remaining, strict=True))
    assert sum(counts) <= budget
    assert counts[0] >= min(remaining[0], budget // 2)
    if waiting == inf:
        assert sum(counts) == min(budget, sum(remaining))


def test_prompts_of_about_one_length_are_computed_one_after_the_other():
    assert divide(100, [Prefill(300), Prefill(200), Prefill(170)], 160) == [100, 0, 0]


def test_a_long_prompt_leaves_half_to_a_much_shorter_one_behind_it_that_runs_or_waits():
    assert divide(100, [Prefill(300), Prefill(100)], inf) == [50, 50]
    assert divide(100, [Prefill(300)], 100) == [50]
    assert divide(100, [Prefill(300), Prefill(250), Prefill(10)], inf) == [50, 40, 10]
    assert divide(100, [Prefill(300, shares=False), Prefill(100)], 100) == [100, 0]
