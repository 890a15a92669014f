"""The step loop over a fake model: whatever the schedule, every request gets the tokens it would get alone."""

from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason, GenerationRequest, Tier
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, expected_tokens, model_info


def make_core(*, batch=4, budget=8, prefix_caching=True, policy="slo", clock=perf_counter, bypass=0.5, **info):
    model = model_info(**info)
    runner = FakeRunner(model)
    limits = SchedulerLimits(batch, budget, bypass)
    scheduling = SchedulingConfig(policy=policy)
    return EngineCore(runner, model, limits, scheduling, prefix_caching=prefix_caching, clock=clock), runner


def request(name, prompt, max_tokens=5, **options):
    return GenerationRequest(name, prompt, max_tokens, ignore_eos=options.pop("ignore_eos", True), **options)


def run(core, limit=10_000):
    """Step until nothing is left; returns tokens and finish reasons by request, integrity checked after every step."""
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    for _ in range(limit):
        if not core.has_work:
            return tokens, reasons
        for output in core.step():
            assert output.request_id not in reasons, "output after the end"
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                reasons[output.request_id] = output.finish
        core.scheduler.check_integrity()
    raise AssertionError("no progress")


def test_requests_together_get_what_each_gets_alone():
    core, _ = make_core()
    prompts = {"a": [1, 2, 3], "b": list(range(1, 30)), "c": [7]}
    for name, prompt in prompts.items():
        assert core.submit(request(name, prompt)) is None
    tokens, reasons = run(core)
    assert tokens == {name: expected_tokens(prompt, 5) for name, prompt in prompts.items()}
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert core.stats().kv_usage == 0.0


def test_a_step_never_exceeds_its_token_budget_and_decodes_come_first():
    core, runner = make_core(batch=3, budget=6)
    core.submit(request("decoding", [1, 2], 20))
    core.step()
    core.submit(request("long", list(range(1, 40))))
    for _ in range(5):
        core.step()
        assert runner.batches[-1].num_tokens <= 6
        first = runner.batches[-1].slices[0]
        assert len(first.token_ids) == 1
        assert first.sampling is not None


def test_a_short_prompt_gets_its_first_token_before_a_long_one_is_computed():
    core, _ = make_core(batch=12, budget=16, num_blocks=200, max_model_len=800)
    core.submit(request("long", [1] * 400, 1))
    core.step()
    for index in range(10):
        core.submit(request(f"short{index}", [index + 2], 1))
    _, order = [], []
    while core.has_work:
        order += [output.request_id for output in core.step()]
    assert order[-1] == "long"


def test_a_stop_token_ends_the_sequence_and_is_its_last_token():
    prompt = [1, 2, 3]
    stop = expected_tokens(prompt, 3)[2]
    core, _ = make_core()
    core.submit(request("a", prompt, 20, stop_token_ids=(stop,)))
    tokens, reasons = run(core)
    assert tokens["a"][-1] == stop
    assert tokens["a"].index(stop) == len(tokens["a"]) - 1
    assert reasons["a"] is FinishReason.STOP


def test_min_tokens_bans_stop_tokens_until_it_is_reached():
    prompt = [1, 2, 3]
    stop = expected_tokens(prompt, 1)[0]
    core, runner = make_core()
    core.submit(request("a", prompt, 6, stop_token_ids=(stop,), min_tokens=3))
    tokens, _ = run(core)
    assert stop not in tokens["a"][:3]
    assert [batch.slices[0].banned_token_ids for batch in runner.batches[:4]] == [[stop], [stop], [stop], ()]


def test_an_aborted_request_gives_its_blocks_back_at_once():
    core, _ = make_core()
    core.submit(request("a", list(range(1, 20)), 50))
    core.submit(request("b", [5, 6], 3))
    core.step()
    core.abort("a")
    core.abort("a")  # a second time is no error
    core.scheduler.check_integrity()
    tokens, _ = run(core)
    assert tokens["b"] == expected_tokens([5, 6], 3)[-len(tokens["b"]) :]


def test_a_repeated_prompt_comes_from_the_prefix_cache_and_changes_nothing():
    core, runner = make_core()
    prompt = list(range(1, 19))
    core.submit(request("first", prompt))
    first, _ = run(core)
    runner.batches.clear()
    core.submit(request("second", prompt))
    second, _ = run(core)
    assert second["second"] == first["first"]
    assert runner.batches[0].slices[0].start == 16  # four full blocks of four; the last tokens are computed
    assert core.stats().prefix_hit_tokens == 16


def test_another_salt_finds_nothing_in_the_prefix_cache():
    core, runner = make_core()
    prompt = list(range(1, 19))
    core.submit(request("first", prompt, cache_salt="tenant a"))
    run(core)
    runner.batches.clear()
    core.submit(request("second", prompt, cache_salt="tenant b"))
    run(core)
    assert runner.batches[0].slices[0].start == 0


def test_nobody_waits_for_a_prefix_that_is_computed_under_another_salt():
    """Waiting would tell that somebody else has just sent the same prompt, and it would be for nothing."""
    core, runner = make_core(batch=4, budget=8)
    prompt = list(range(1, 30))
    core.submit(request("first", prompt, cache_salt="tenant a"))
    core.step()
    core.submit(request("second", prompt, cache_salt="tenant b"))
    core.step()
    assert [piece.start for piece in runner.batches[-1].slices] == [8, 0]
    tokens, _ = run(core)
    assert tokens["second"] == expected_tokens(prompt, 5)
    assert core.stats().prefix_hit_tokens == 0


def test_a_pool_of_a_quarter_of_the_demand_finishes_everything_unchanged():
    core, _ = make_core(batch=6, budget=16, num_blocks=12, block_size=4)
    prompts = {f"r{index}": [index + 1] * 8 for index in range(6)}
    for name, prompt in prompts.items():
        core.submit(request(name, prompt, 24))
    tokens, _ = run(core)
    assert tokens == {name: expected_tokens(prompt, 24) for name, prompt in prompts.items()}
    assert 0 < core.stats().preemptions <= 5 * len(prompts)


def test_the_oldest_request_is_never_preempted():
    core, _ = make_core(batch=4, budget=16, num_blocks=8, block_size=4)
    for index in range(4):
        core.submit(request(f"r{index}", [index + 1] * 4, 24))
    oldest = min(core.scheduler.waiting, key=lambda one: one.number)
    run(core)
    assert oldest.preemptions == 0
    assert core.stats().preemptions > 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [([], 1, False), ([1], 0, False), ([1] * 31, 1, True), ([1] * 32, 1, False), ([1] * 100, 1, False)],
)
def test_a_request_that_can_never_run_is_refused_and_nothing_else(prompt, max_tokens, fits):
    core, _ = make_core(num_blocks=8, block_size=4)
    assert (core.submit(request("a", prompt, max_tokens)) is None) is fits
    core.submit(request("b", [3, 4], 2))
    tokens, _ = run(core)
    assert tokens["b"] == expected_tokens([3, 4], 2)


def test_output_that_would_outgrow_the_pool_ends_with_length():
    core, _ = make_core(num_blocks=4, block_size=4)
    core.submit(request("a", [1] * 10, 200))
    tokens, reasons = run(core)
    assert tokens["a"] == expected_tokens([1] * 10, 6)
    assert reasons["a"] is FinishReason.LENGTH


class Clock:
    """Time that goes on only when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_request_whose_timeout_is_over_never_takes_a_slot_and_ends_with_that_reason():
    clock = Clock()
    core, runner = make_core(batch=1, clock=clock)
    core.submit(request("running", [1, 2], 6))
    core.submit(request("late", [3, 4], timeout=1.0))
    core.submit(request("patient", [5, 6], timeout=50.0))
    core.step()
    clock.now += 1.0
    [expired] = [output for output in core.step() if output.request_id == "late"]
    assert (expired.finish, expired.token_ids) == (FinishReason.TIMEOUT, ())
    tokens, reasons = run(core)
    assert tokens["patient"] == expected_tokens([5, 6], 5)
    assert reasons["patient"] is FinishReason.LENGTH
    assert all(
        piece.token_ids[0] not in (3, 4) for batch in runner.batches for piece in batch.slices if piece.start == 0
    )
    assert core.stats().expirations == 1


def test_a_running_request_whose_timeout_is_over_is_stopped_and_gives_its_blocks_back():
    clock = Clock()
    core, _ = make_core(clock=clock)
    core.submit(request("a", [1, 2, 3], 50, timeout=2.0))
    got = [token for _ in range(4) for output in core.step() for token in output.token_ids]
    clock.now += 2.0
    [last] = core.step()
    assert (last.finish, last.token_ids) == (FinishReason.TIMEOUT, ())
    assert got == expected_tokens([1, 2, 3], 4)
    assert not core.has_work
    assert core.stats().kv_usage == 0.0
    core.scheduler.check_integrity()


def test_a_request_that_ended_in_time_does_not_expire_later():
    clock = Clock()
    core, _ = make_core(clock=clock)
    core.submit(request("done", [1, 2], 2, timeout=1.0))
    core.submit(request("gone", [1, 2], 9, timeout=1.0))
    core.step()
    core.abort("gone")
    _, reasons = run(core)
    clock.now += 5.0
    core.submit(request("other", [4, 5], 2))
    assert {output.request_id for output in core.step()} == {"other"}
    assert reasons == {"done": FinishReason.LENGTH}


def full_but_for_three_blocks(bypass):
    """A pool of 20 blocks, where one request holds 17 and grows slowly; a request of ten blocks waits at the head."""
    clock = Clock()
    core, _ = make_core(batch=8, budget=80, num_blocks=20, block_size=4, clock=clock, bypass=bypass)
    core.submit(request("holder", [1] * 64, 12))
    core.step()
    core.submit(request("head", [2] * 37, 1))
    return core, clock


def started(core):
    return {sequence.request_id for sequence in core.scheduler.running}


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


def test_with_a_bypass_of_zero_nobody_passes():
    core, _ = full_but_for_three_blocks(bypass=0.0)
    core.submit(request("small", [3, 4], 1))
    core.step()
    assert started(core) == {"holder"}


def test_tiny_requests_start_while_a_prompt_of_sixty_steps_is_computed():
    core, _ = make_core(batch=12, budget=64, num_blocks=300, block_size=16, max_model_len=4_100)
    core.submit(request("long", [1] * 4_000, 1))
    core.step()
    for index in range(10):
        core.submit(request(f"tiny{index}", [index + 2], 1))
    assert {f"tiny{index}" for index in range(10)} <= {output.request_id for output in core.step()}, "one step later"


def test_a_resumed_sequence_is_not_thrown_out_again_in_the_next_steps():
    core, _ = make_core(batch=8, budget=64, num_blocks=16, block_size=4)
    for index in range(8):
        core.submit(request(f"r{index}", [index + 1] * 4, 30))
    resumed: dict[str, int] = {}
    for step in range(1_000):
        if not core.has_work:
            break
        before = {one.request_id: one.preemptions for one in core.scheduler.running}
        core.step()
        for one in core.scheduler.running:
            if one.request_id not in before and one.preemptions:
                resumed[one.request_id] = step
        for one in core.scheduler.waiting:
            if one.preemptions > before.get(one.request_id, one.preemptions):
                assert step - resumed.get(one.request_id, -99) > 1, "resumed only to be preempted"


def test_what_a_tenant_is_charged_is_its_uncached_prompt_once_its_output_and_the_blocks_that_it_holds():
    core, _ = make_core(batch=2, budget=64, num_blocks=64, block_size=4)
    core.submit(request("a", list(range(1, 12)), 3, tenant="t"))
    used = core.scheduler.waiting._counters.used
    core.step()  # the prompt's 11 tokens and the first output, three blocks held
    assert used("t") == pytest.approx(11 + 2 + 3 * 0.05)
    core.step()
    assert used("t") == pytest.approx(11 + 4 + 6 * 0.05)
    core.scheduler._preempt(core.scheduler.running[0], 0.0)
    core.step()  # its first two blocks come from the cache; what has to be computed anew costs nothing
    assert used("t") == pytest.approx(11 + 6 + 10 * 0.05)


def test_steps_that_generate_for_a_tier_stay_within_its_target_while_a_long_prompt_is_computed():
    class Machine(FakeRunner):
        def execute(self, batch):
            clock.now += 0.010 + 0.001 * batch.num_tokens
            return super().execute(batch)

    clock, info = Clock(), model_info(num_blocks=400, max_model_len=1_500)
    core = EngineCore(Machine(info), info, SchedulerLimits(4, 512), SchedulingConfig(), clock=clock)
    core.submit(request("warm", [1] * 300, 8))
    core.submit(request("talk", [2] * 8, 60, tier=Tier.INTERACTIVE))
    run_steps = [core.step() for _ in range(10)]
    assert run_steps
    core.submit(request("long", [3] * 1_000, 2))
    steps = []
    while any(one.request_id == "talk" for one in core.scheduler.running) and core.has_work:
        begin = clock.now
        core.step()
        steps.append(clock.now - begin)
    assert max(steps) == pytest.approx(0.1, rel=0.05), "as much as fits into the 100 ms of interactive"
    run(core)


def test_requests_that_share_a_prefix_which_is_being_computed_wait_for_it_instead_of_computing_it_too():
    core, runner = make_core(batch=8, budget=32, num_blocks=200, block_size=4)
    shared = list(range(1, 41)) * 2
    prompts = {f"r{index}": [*shared, index + 1, index + 2] for index in range(6)}
    for name, prompt in prompts.items():
        core.submit(request(name, prompt, 2))
    core.submit(request("other", [45] * 6, 2))
    core.step()
    second = core.step()
    assert {output.request_id for output in second} == {"other"}, "nobody else is held up by them"
    tokens, _ = run(core)
    assert {name: tokens[name] for name in prompts} == {n: expected_tokens(p, 2) for n, p in prompts.items()}
    computed = sum(batch.num_tokens for batch in runner.batches)
    assert computed <= len(shared) + 6 * (2 + 4 + 2) + 8, "the prefix once, and a block's rest for each"


def test_when_the_one_that_computes_a_shared_prefix_is_aborted_the_next_computes_it():
    core, runner = make_core(batch=8, budget=16, num_blocks=200, block_size=4)
    shared = list(range(1, 61))
    for name in ("first", "second", "third"):
        core.submit(request(name, [*shared, ord(name[0]) % 40], 2))
    core.step()
    assert started(core) == {"first"}
    core.abort("first")
    core.step()
    assert started(core) == {"second"}
    tokens, _ = run(core)
    assert {name: len(got) for name, got in tokens.items()} == {"second": 2, "third": 2}
    assert sum(batch.num_tokens for batch in runner.batches) < 16 + 2 * 61


def test_without_a_prefix_cache_nobody_waits_for_a_prefix():
    core, _ = make_core(batch=8, budget=16, num_blocks=200, block_size=4, prefix_caching=False)
    for index in range(3):
        core.submit(request(f"r{index}", [*range(1, 60), index + 1], 2))
    core.step()
    core.step()
    assert len(core.scheduler.running) > 1


arrivals = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=20),  # few distinct tokens: prefixes are shared often
        st.integers(1, 12),
        st.integers(0, 6),  # steps until the next arrival
        st.integers(0, 30),  # steps after which it is aborted; 0 is never
        st.fixed_dictionaries(
            {
                "tier": st.sampled_from(list(Tier)),
                "priority": st.integers(-1, 1),
                "tenant": st.sampled_from("ab"),
                "timeout": st.sampled_from([None, None, None, 5.0, 40.0]),
            }
        ),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals, pool=st.integers(8, 20), batch=st.integers(1, 6), extra=st.integers(0, 20), caching=st.booleans()
)
@pytest.mark.parametrize("policy", ["slo", "fcfs", "priority", "sjf"])
def test_any_mix_of_arrivals_aborts_timeouts_preemptions_and_prefix_hits_is_invisible_in_the_output(
    policy, arrivals, pool, batch, extra, caching
):
    clock = Clock()  # one step a second: things age, expire and stop being passed
    core, _ = make_core(
        batch=batch,
        budget=batch + extra,
        num_blocks=pool,
        prefix_caching=caching,
        policy=policy,
        clock=clock,
        bypass=3.0,
    )
    reasons: dict[str, FinishReason] = {}
    tokens: dict[str, list[int]] = {}
    aborts: dict[int, list[str]] = {}
    step = 0

    def advance():
        nonlocal step
        for name in aborts.pop(step, []):
            core.abort(name)
        for output in core.step():
            assert output.request_id not in reasons, "output after the end"
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                reasons[output.request_id] = output.finish
        core.scheduler.check_integrity()
        step += 1
        clock.now += 1.0

    for index, (prompt, max_tokens, pause, abort_after, options) in enumerate(arrivals):
        core.submit(request(str(index), prompt, max_tokens, **options))
        if abort_after:
            aborts.setdefault(step + abort_after, []).append(str(index))
        for _ in range(pause):
            advance()
    for _ in range(2_000):
        if not core.has_work:
            break
        advance()
    assert not core.has_work, "no progress"
    for index, (prompt, max_tokens, _, abort_after, _) in enumerate(arrivals):
        got, reference = tokens.get(str(index), []), expected_tokens(prompt, max_tokens)
        assert got == reference[: len(got)]
        assert abort_after or got == reference or reasons[str(index)] is FinishReason.TIMEOUT
    assert core.stats().preemptions <= 5 * len(arrivals)
