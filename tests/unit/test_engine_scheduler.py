"""The scheduler under anything that can happen to it, one operation at a time, the books checked after each."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason, GenerationRequest, Tier
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, expected_tokens, model_info

PREFIXES = ((1,) * 12, (1,) * 8 + (2,) * 8, (3,) * 6)
BATCH, BYPASS = 4, 3.0


class TimedRunner(FakeRunner):
    """Takes a millisecond a token."""

    def __init__(self, info, pass_time):
        super().__init__(info)
        self._pass_time = pass_time

    def execute(self, batch):
        self._pass_time(0.001 * batch.num_tokens)
        return super().execute(batch)


class EngineLife(RuleBasedStateMachine):
    """Requests come, run, are preempted, aborted and time out; blocks are shared, evicted and found again.

    Time passes by a second a step, and a little by token, so that swapping pays. The model of what is right: each
    request's tokens are those that it would get alone.
    """

    policy = "slo"

    @initialize(
        blocks=st.integers(8, 24), budget=st.integers(BATCH, 24), caching=st.booleans(), slots=st.integers(0, 16)
    )
    def start(self, blocks, budget, caching, slots):
        info = model_info(num_blocks=blocks, block_size=4, swap_slots=slots)
        self.now = 0.0
        self.core = EngineCore(
            TimedRunner(info, self.pass_time),
            info,
            SchedulerLimits(BATCH, budget, BYPASS),
            SchedulingConfig(policy=self.policy, admission="none", promote_after_seconds=15.0),
            prefix_caching=caching,
            clock=lambda: self.now,
        )
        self.prompts: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason | None] = {}
        self.left: dict[str, int] = {}

    @rule(
        prefix=st.sampled_from(PREFIXES),
        cut=st.integers(1, 12),
        own=st.integers(4, 40),
        output=st.integers(1, 12),
        tier=st.sampled_from(list(Tier)),
        tenant=st.sampled_from("ab"),
        timeout=st.sampled_from([None, None, 4.0, 25.0]),
    )
    def arrive(self, prefix, cut, own, output, tier, tenant, timeout):
        name = str(len(self.prompts))
        prompt = [*prefix[:cut], own]
        options = {"tier": tier, "tenant": tenant, "timeout": timeout, "priority": own % 3}
        assert self.core.submit(GenerationRequest(name, prompt, output, ignore_eos=True, **options)) is None
        self.prompts[name], self.got[name], self.left[name] = prompt, [], output

    @rule(steps=st.integers(1, 12))
    def steps(self, steps):
        for _ in range(steps):
            before = self.computed()
            outputs = self.core.step()
            self.now += 1.0
            for output in outputs:
                self.take(output)
            self.core.scheduler.check_integrity()
            alive = self.core.has_work
            assert self.computed() > before or not alive or outputs, "a step that did nothing"

    @precondition(lambda self: getattr(self, "prompts", None))
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.core.abort(name)
        self.ended.setdefault(name, None)

    @precondition(lambda self: getattr(self, "prompts", None))
    @rule(data=st.data())
    def reads_the_forecast(self, data):
        assert all(seconds >= 0.0 for seconds in self.core.stats().predicted_ttft_seconds.values())

    @invariant()
    def books_agree(self):
        if not hasattr(self, "core"):
            return
        scheduler = self.core.scheduler
        scheduler.check_integrity()
        inside = {one.request_id for one in scheduler.waiting} | {one.request_id for one in scheduler.running}
        assert inside == set(self.prompts) - set(self.ended)
        assert len(scheduler.waiting) == sum(1 for _ in scheduler.waiting)
        assert scheduler.waiting.num_tokens == sum(one.num_tokens for one in scheduler.waiting)

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(3_000):
            if not self.core.has_work:
                break
            self.steps(1)
        assert not self.core.has_work, "something never ended"
        assert self.core.stats().kv_usage == 0.0
        for name, reason in self.ended.items():
            if reason is FinishReason.LENGTH:
                assert len(self.got[name]) == self.left[name]

    def take(self, output):
        name = output.request_id
        assert name not in self.ended, "output after the end"
        self.got[name] += output.token_ids
        assert self.got[name] == expected_tokens(self.prompts[name], len(self.got[name]))
        if output.finish is not None:
            self.ended[name] = output.finish

    def pass_time(self, seconds):
        self.now += seconds

    def computed(self):
        return self.core.stats().computed_tokens


@pytest.mark.parametrize("policy", ["slo", "fcfs", "priority", "sjf"])
def test_whatever_happens_the_books_agree_and_everybody_gets_their_own_tokens(policy):
    machine = type("EngineLife", (EngineLife,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=40))
