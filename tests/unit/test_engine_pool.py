"""A KV pool smaller than the demand: everybody finishes, and who does not fit is passed for a bounded time."""

from stepping import Clock, make_core, request, run, started, step

from paceline_server.engine.interface import FinishReason
from paceline_server.engine.testing import expected_tokens


def test_a_pool_of_a_quarter_of_the_demand_finishes_everything_unchanged():
    core, _ = make_core(batch=6, budget=16, num_blocks=12, block_size=4)
    prompts = {f"r{index}": [index + 1] * 8 for index in range(6)}
    for name, prompt in prompts.items():
        core.submit(request(name, prompt, 24))
    tokens, _ = run(core)
    assert tokens == {name: expected_tokens(prompt, 24) for name, prompt in prompts.items()}
    assert 0 < core.stats().preemptions <= 5 * len(prompts)
    queried = core.stats().prefix_queried_tokens
    assert queried == sum(map(len, prompts.values())), "each prompt is looked up once, however often it comes back"


def test_the_oldest_request_is_never_preempted():
    core, _ = make_core(batch=4, budget=16, num_blocks=8, block_size=4)
    for index in range(4):
        core.submit(request(f"r{index}", [index + 1] * 4, 24))
    oldest = min(core.scheduler.waiting, key=lambda one: one.number)
    run(core)
    assert oldest.preemptions == 0
    assert core.stats().preemptions > 0


def test_output_that_would_outgrow_the_pool_ends_with_length():
    core, _ = make_core(num_blocks=4, block_size=4)
    core.submit(request("a", [1] * 10, 200))
    tokens, reasons = run(core)
    assert tokens["a"] == expected_tokens([1] * 10, 6)
    assert reasons["a"] is FinishReason.LENGTH


def full_but_for_three_blocks(bypass):
    """A pool of 20 blocks, where one request holds 17 and grows slowly; a request of ten blocks waits at the head."""
    clock = Clock()
    core, _ = make_core(batch=8, budget=80, num_blocks=20, block_size=4, clock=clock, bypass=bypass)
    core.submit(request("holder", [1] * 64, 12))
    core.step()
    core.submit(request("head", [2] * 37, 1))
    return core, clock


def test_smaller_requests_pass_a_head_that_does_not_fit():
    core, _ = full_but_for_three_blocks(bypass=0.5)
    core.submit(request("small", [3, 4], 1))
    assert "small" in {output.request_id for output in core.step()}


def test_nobody_passes_a_head_that_has_been_blocked_for_the_bounded_time():
    core, clock = full_but_for_three_blocks(bypass=0.5)
    core.step()
    clock.now += 0.5
    core.submit(request("small", [3, 4], 1))
    core.step()
    assert started(core) == {"holder"}
    tokens, _ = run(core)
    assert tokens["head"] == expected_tokens([2] * 37, 1)
    assert tokens["small"] == expected_tokens([3, 4], 1)


def test_nobody_passes_it_either_once_it_is_late_however_many_come_that_can_be_in_time():
    clock = Clock()
    core, _ = make_core(batch=64, budget=2048, num_blocks=256, block_size=16, max_model_len=4096, clock=clock)

    def steps_until(wanted, steps):
        for number in range(steps):
            core.submit(request(f"{clock.now}", [3] * 12, 50))
            clock.now += 0.02
            if any(output.request_id == wanted for output in step(core)):
                return number
        return steps

    steps_until(None, 60)
    core.submit(request("large", [2] * 1590, 1))
    assert 25 < steps_until("large", 200) < 200, "it does not fit for half a second, and then its blocks gather"


def test_one_that_was_to_be_the_next_and_goes_away_stops_nobody():
    core, clock = full_but_for_three_blocks(bypass=0.5)
    step(core)
    clock.now += 0.6
    step(core)
    core.abort("head")
    core.submit(request("small", [3, 4], 1))
    assert "small" in {output.request_id for output in step(core)}


def test_what_a_newcomer_that_does_not_fit_would_have_got_goes_to_the_prompt_under_way():
    core, runner = make_core(batch=4, budget=16, num_blocks=20, block_size=4)
    core.submit(request("long", [1] * 60, 1))
    step(core)
    core.submit(request("newcomer", [2] * 21, 1))  # so much shorter that half of the step is left to it
    step(core)
    assert [len(piece.token_ids) for piece in runner.batches[-1].slices] == [16]


def test_with_a_bypass_of_zero_nobody_passes():
    core, _ = full_but_for_three_blocks(bypass=0.0)
    core.submit(request("small", [3, 4], 1))
    core.step()
    assert started(core) == {"holder"}


def test_a_resumed_sequence_is_not_thrown_out_again_in_the_next_steps():
    core, _ = make_core(batch=8, budget=64, num_blocks=16, block_size=4)
    for index in range(8):
        core.submit(request(f"r{index}", [index + 1] * 4, 30))
    resumed: dict[str, int] = {}
    for number in range(1_000):
        if not core.has_work:
            break
        before = {one.request_id: one.preemptions for one in core.scheduler.running}
        core.step()
        for one in core.scheduler.running:
            if one.request_id not in before and one.preemptions:
                resumed[one.request_id] = number
        for one in core.scheduler.waiting:
            if one.preemptions > before.get(one.request_id, one.preemptions):
                assert number - resumed.get(one.request_id, -99) > 1, "resumed only to be preempted"
