"""When a first token is expected, and who is refused for it."""

from math import exp
from random import Random

import pytest

from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.forecast import ArrivalRate, Departures, Forecast, Newcomer, OutputLengths, Room
from paceline_server.engine.interface import GenerationRequest, Tier
from paceline_server.engine.queue import Backlog
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.steptime import StepShape, StepTimeModel
from paceline_server.engine.testing import TimedRunner, model_info

EMPTY = Backlog(0, 0)


def make_core(admission="target", batch=4, budget=64, num_blocks=256, **scheduling):
    info = model_info(num_blocks=num_blocks, max_model_len=1_000)
    machine = TimedRunner(info)
    config = SchedulingConfig(admission=admission, **scheduling)
    core = EngineCore(machine, info, SchedulerLimits(batch, budget), config, clock=machine)
    for index in range(8):  # steps with and without prompts: their cost is known afterwards
        core.submit(request(f"warm{index}", 5 + index, 4, tier=Tier.BATCH))
        while core.has_work:
            core.step()
    return core, machine


def request(name, prompt=10, max_tokens=4, **options):
    tokens = (sum(name.encode()) % 49 + 1,) * prompt
    return GenerationRequest(name, tokens, max_tokens, ignore_eos=True, **options)


def first_token_after(core, machine, name):
    begin = machine.now
    while True:
        if any(output.request_id == name for output in core.step()):
            return machine.now - begin


def test_nothing_is_refused_before_steps_are_known():
    info = model_info()
    core = EngineCore(TimedRunner(info), info, SchedulerLimits(4, 8), SchedulingConfig(admission="target"))
    assert core.submit(request("a", 40, timeout=1e-9)) is None
    assert core.stats().predicted_ttft_seconds == {}


def test_the_forecast_for_an_idle_engine_is_the_time_of_its_own_prompt():
    core, machine = make_core()
    core.submit(request("a", 150))
    assert core.admission.last_forecast == pytest.approx(first_token_after(core, machine, "a"), rel=0.1)


def test_the_forecast_behind_prompts_is_the_time_to_compute_them_all():
    core, machine = make_core(admission="none")
    for index in range(3):
        core.submit(request(f"a{index}", 150))
    core.submit(request("last", 60))
    assert core.admission.last_forecast == pytest.approx(first_token_after(core, machine, "last"), rel=0.15)


def test_the_forecast_with_all_slots_taken_is_the_time_until_one_comes_free():
    core, machine = make_core(admission="none", batch=2)
    core.submit(request("a", 10, 40))
    core.submit(request("b", 10, 90))
    core.step()
    core.submit(request("c", 10))
    assert core.admission.last_forecast == pytest.approx(first_token_after(core, machine, "c"), rel=0.15)


def test_the_forecast_with_all_blocks_taken_is_the_time_until_enough_come_free():
    core, machine = make_core(admission="none", num_blocks=40)
    core.submit(request("a", 100, 40))
    core.step()
    core.submit(request("b", 60))
    assert core.admission.last_forecast == pytest.approx(first_token_after(core, machine, "b"), rel=0.15)


def test_the_forecast_behind_a_long_prompt_under_way_counts_no_more_of_it_than_half_a_step_each_time():
    core, machine = make_core(admission="none")
    core.submit(request("long", 900))
    core.step()
    core.submit(request("short", 100))
    assert core.admission.last_forecast == pytest.approx(first_token_after(core, machine, "short"), rel=0.25)
    assert core.scheduler.running[0].remaining > 400


def test_the_forecast_of_a_tier_counts_the_more_urgent_that_keep_coming():
    core, _ = make_core(admission="none", batch=4)
    for index in range(4):
        core.submit(request(f"first{index}", 10, 20))
    forecasts = []
    for index in range(30):  # every fourth step an interactive one comes
        for _ in range(4):
            core.step()
        core.submit(request(f"urgent{index}", 10, 20, tier=Tier.INTERACTIVE))
        forecasts.append(core.stats().predicted_ttft_seconds)
    assert forecasts[-1]["batch"] > 2 * forecasts[-1]["interactive"]
    assert len(core.scheduler.waiting) > 0


def test_what_the_prefix_cache_holds_is_not_expected_to_take_time():
    core, machine = make_core()
    core.submit(request("a", 200))
    first_token_after(core, machine, "a")
    core.abort("a")
    core.submit(request("a", 200))
    assert core.admission.last_forecast < 0.04


def share_a_prefix(core, machine, **limits):
    """Run requests that begin with the same 50 blocks, each to the limit that is given under its name."""
    for number, (name, limit) in enumerate(limits.items()):
        core.submit(GenerationRequest(name, (48,) * 200 + (number,), limit, ignore_eos=True))
        first_token_after(core, machine, name)


def test_the_forecast_counts_no_block_that_a_newcomer_finds_held_by_others():
    core, machine = make_core(admission="none", num_blocks=80)
    share_a_prefix(core, machine, a=100)
    core.submit(GenerationRequest("b", (48,) * 200 + (9,), 10, ignore_eos=True))
    assert core.admission.last_forecast == pytest.approx(first_token_after(core, machine, "b"), rel=0.15)


def test_the_forecast_expects_no_block_of_a_sequence_that_others_go_on_holding():
    core, machine = make_core(admission="none", num_blocks=73)
    share_a_prefix(core, machine, a=40, b=90)
    core.submit(request("c", 88))
    assert core.admission.last_forecast == pytest.approx(first_token_after(core, machine, "c"), rel=0.2)


def test_a_request_that_would_miss_its_target_is_refused_with_the_time_after_which_it_would_not():
    core, machine = make_core(batch=2)
    for name in "ab":
        core.submit(request(name, 10, 200))
    core.step()
    refusal = core.submit(request("c"))
    assert refusal.retry_after >= core.admission.last_forecast - 0.5 > 0
    assert "within 0.50 s" in refusal.message
    assert len(core.scheduler.waiting) == 0, "it never entered the line"
    machine.now += refusal.retry_after
    until = machine.now
    machine.now -= refusal.retry_after
    while machine.now < until:
        core.step()
    assert core.submit(request("c")) is None


def test_time_that_has_passed_before_the_engine_got_the_request_counts():
    core, machine = make_core()
    machine.now += 10.0
    assert core.submit(request("a"), arrival=machine.now - 0.4) is None
    assert core.submit(request("b"), arrival=machine.now - 0.6).retry_after > 0.0


@pytest.mark.parametrize(
    ("mode", "options", "taken"),
    [
        ("none", {"timeout": 0.1}, True),
        ("timeout", {"timeout": 0.1}, False),
        ("timeout", {}, True),
        ("target", {}, False),
        ("target", {"tier": Tier.BATCH}, True),
        ("target", {"tier": Tier.BATCH, "timeout": 0.1}, False),
    ],
)
def test_the_mode_says_what_a_request_must_be_able_to_meet(mode, options, taken):
    core, _ = make_core(admission=mode, batch=2)
    for name in "ab":
        core.submit(request(name, 10, 200, tier=Tier.BATCH))
    core.step()
    assert (core.submit(request("c", **options)) is None) is taken


def test_a_prompt_that_misses_its_target_even_alone_is_no_overload():
    core, _ = make_core()
    assert core.submit(request("long", 900, tier=Tier.INTERACTIVE)) is None
    assert core.submit(request("second", 900, tier=Tier.INTERACTIVE)) is None, "within twice its own time"
    assert core.submit(request("third", 900, tier=Tier.INTERACTIVE)).retry_after > 0


def test_an_aborted_or_expired_request_leaves_nothing_behind():
    core, machine = make_core(admission="none", batch=1)
    core.submit(request("running", 10, 50))
    core.step()
    for index in range(20):
        core.submit(request(f"a{index}"))
        core.submit(request(f"t{index}", timeout=0.01))
        core.abort(f"a{index}")
    machine.now += 1.0
    while core.has_work:
        core.step()
    assert core.admission._predicted == core.admission._submitted == {}


def test_the_outlook_is_given_by_tier():
    core, _ = make_core(admission="none", batch=2)
    for index in range(6):
        core.submit(request(f"a{index}", 10, 100, tier=Tier.STANDARD))
    core.step()
    outlook = core.stats().predicted_ttft_seconds
    assert outlook["interactive"] < outlook["standard"] <= outlook["batch"]


def test_errors_of_one_kind_correct_the_forecast_of_their_tier_within_bounds():
    model = StepTimeModel()
    for tokens in range(1, 9):
        shape = StepShape(tokens, tokens, prefills=True)
        model.observe(shape, 0.01 * tokens)
    forecast, room = Forecast(model), Room(4, 100, 16, 64, left_by=lambda _: 1)
    before = forecast.seconds(Newcomer(Tier.STANDARD, 10, 1, EMPTY), (), room)
    for _ in range(200):
        said = forecast.seconds(Newcomer(Tier.STANDARD, 10, 1, EMPTY), (), room)
        forecast.observe(Tier.STANDARD, said, 1.5 * before)
        forecast.observe(Tier.BATCH, 1.0, 100.0)
    assert forecast.seconds(Newcomer(Tier.STANDARD, 10, 1, EMPTY), (), room) == pytest.approx(1.5 * before, rel=0.05)
    assert forecast.correction(Tier.BATCH) == pytest.approx(4.0)
    assert forecast.correction(Tier.INTERACTIVE) == forecast.margin(Tier.INTERACTIVE) == 1.0


def test_the_margin_is_the_factor_within_which_nine_of_ten_start():
    forecast, random = Forecast(StepTimeModel()), Random(7)
    ratios = [exp(random.gauss(0.0, 0.3)) for _ in range(3_000)]
    within = 0
    for ratio in ratios:
        said = forecast.correction(Tier.STANDARD)
        within += ratio <= said * forecast.margin(Tier.STANDARD)
        forecast.observe(Tier.STANDARD, said, ratio)
    assert within / len(ratios) == pytest.approx(0.9, abs=0.02)
    assert forecast.correction(Tier.STANDARD) == pytest.approx(1.0, abs=0.1)


def test_the_length_to_come_is_the_mean_of_the_longer_answers():
    lengths = OutputLengths()
    assert (lengths.cut_share, lengths.remaining(7)) == (1.0, 7)
    for length in (10, 20, 60):
        lengths.observe(length, cut=False)
    lengths.observe(500, cut=True)
    assert lengths.cut_share == 0.25
    assert lengths.remaining(0) == 30
    assert lengths.remaining(15) == 25
    assert lengths.remaining(60) == 60
    for _ in range(256):
        lengths.observe(5, cut=False)
    assert (lengths.remaining(0), lengths.cut_share) == (5, 0.0)


def running(count, max_tokens, generated=0):
    made = []
    for index in range(count):
        one = Sequence(GenerationRequest(str(index), (1, 2), max_tokens), 0.0, max_tokens)
        one.token_ids += [1] * generated
        made.append(one)
    return made


def test_answers_that_go_to_their_limits_leave_in_that_order():
    sequences = [running(1, limit)[0] for limit in (90, 10, 50)]
    slots = Departures(OutputLengths(), sequences, lambda _: 1)
    assert [slots.steps_until(count) for count in (0, 1, 2, 3)] == [0, 10, 50, 90]
    blocks = Departures(OutputLengths(), sequences, lambda _: 4)
    assert [blocks.steps_until(count) for count in (4, 5)] == [10, 50]


def test_answers_that_end_by_themselves_leave_at_the_rate_of_their_mean_length():
    random, lengths = Random(6), OutputLengths()
    for _ in range(256):
        lengths.observe(1 + int(random.expovariate(1 / 100)), cut=False)
    departures = Departures(lengths, running(50, 100_000, generated=20), lambda _: 1)
    assert departures.steps_until(5) == pytest.approx(5 * 100 / 50, rel=0.2)


def test_a_rate_is_right_from_the_first_seconds_on_and_fades():
    rate = ArrivalRate()
    assert rate.per_second(5.0) == 0.0
    for index in range(40):
        rate.note(10.0 + index / 20)
    assert rate.per_second(12.0) == pytest.approx(20.0, rel=0.1)
    for index in range(400):
        rate.note(12.0 + index / 20)
    assert rate.per_second(32.0) == pytest.approx(20.0, rel=0.05)
    assert rate.per_second(52.0) < 1.0
