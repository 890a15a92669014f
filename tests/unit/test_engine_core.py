"""The step loop over a fake model: whatever the schedule, every request gets the tokens it would get alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import Answers, Clock, make_core, request, run, step

from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason, Tier
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, expected_tokens, model_info


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


def test_tiny_requests_start_while_a_prompt_of_sixty_steps_is_computed():
    core, _ = make_core(batch=12, budget=64, num_blocks=300, block_size=16, max_model_len=4_100)
    core.submit(request("long", [1] * 4_000, 1))
    core.step()
    for index in range(10):
        core.submit(request(f"tiny{index}", [index + 2], 1))
    assert {f"tiny{index}" for index in range(10)} <= {output.request_id for output in core.step()}, "one step later"


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


@settings(max_examples=150)
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
    answers = Answers()
    aborts: dict[int, list[str]] = {}
    steps = 0

    def advance():
        nonlocal steps
        for name in aborts.pop(steps, []):
            core.abort(name)
        answers.take(step(core))
        steps += 1
        clock.now += 1.0

    for index, (prompt, max_tokens, pause, abort_after, options) in enumerate(arrivals):
        core.submit(request(str(index), prompt, max_tokens, **options))
        if abort_after:
            aborts.setdefault(steps + abort_after, []).append(str(index))
        for _ in range(pause):
            advance()
    for _ in range(2_000):
        if not core.has_work:
            break
        advance()
    assert not core.has_work, "no progress"
    for index, (prompt, max_tokens, _, abort_after, _) in enumerate(arrivals):
        got, reference = answers.tokens.get(str(index), []), expected_tokens(prompt, max_tokens)
        assert got == reference[: len(got)]
        assert abort_after or got == reference or answers.reasons[str(index)] is FinishReason.TIMEOUT
    assert core.stats().preemptions <= 5 * len(arrivals)
