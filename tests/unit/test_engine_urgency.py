"""A request whose deadline is near takes slot and blocks of running ones of a lower tier, and everybody finishes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting_lines import TARGETS, fill, line_of, sequence

from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason, GenerationRequest, Tier
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, expected_tokens, model_info
from paceline_server.engine.urgency import MAX_YIELDS, cheapest_victims

STEP = 0.01
TTFT = 0.1  # seconds, of the interactive tier


class TimedRunner(FakeRunner):
    """Says how many tokens it computes."""

    def __init__(self, info, note_tokens):
        super().__init__(info)
        self._note_tokens = note_tokens

    def execute(self, batch):
        self._note_tokens(batch.num_tokens)
        return super().execute(batch)


class Engine:
    """A core whose steps take 10 ms, and what its requests got, by name and answer.

    Args:
        by_token: seconds that a token takes besides; where there are some, swapping pays.
    """

    def __init__(
        self,
        batch=2,
        blocks=64,
        budget=16,
        policy="slo",
        caching=False,
        swap=0,
        by_token=0.0,
        copying=0.0,
        block_size=4,
    ):
        self.now = 0.0
        self.by_token = by_token
        info = model_info(num_blocks=blocks, block_size=block_size, swap_slots=swap, block_copy_seconds=copying)
        config = SchedulingConfig(policy=policy, admission="none")
        limits = SchedulerLimits(batch, budget)
        runner = TimedRunner(info, self.pass_time)
        self.core = EngineCore(runner, info, limits, config, prefix_caching=caching, clock=lambda: self.now)
        self.prompts: dict[str, list[int]] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.first: dict[str, float] = {}
        self.ended: set[str] = set()
        self.yields: dict[str, int] = {}
        self.preempted: set[str] = set()

    def pass_time(self, tokens):
        self.now += self.by_token * tokens

    def ask(self, name, tier, output, prompt=4, token=7, n=1, **options):
        self.prompts[name] = [token] * prompt
        self.got |= {(name, index): [] for index in range(n)}
        request = GenerationRequest(name, self.prompts[name], output, ignore_eos=True, tier=tier, n=n, **options)
        assert self.core.submit(request) is None

    def step(self):
        outputs = self.core.step()
        self.now += STEP
        self.core.scheduler.check_integrity()
        for one in [*self.core.scheduler.running, *self.core.scheduler.waiting]:
            self.yields |= {one.request_id: one.yields} if one.yields else {}
            self.preempted |= {one.request_id} if one.preemptions else set()
        for output in outputs:
            self.first.setdefault(output.request_id, self.now)
            self.got[output.request_id, output.index] += output.token_ids
            if output.finish is FinishReason.LENGTH:
                self.ended.add(output.request_id)

    def run(self, steps):
        for _ in range(steps):
            self.step()

    @property
    def preemptions(self):
        return self.core.scheduler.totals.preemptions

    def assert_all_got_their_own_tokens(self):
        for (name, _), tokens in self.got.items():
            assert tokens == expected_tokens(self.prompts[name], len(tokens))


def busy(tier=Tier.BATCH, prompt=4, **options):
    """Two sequences that hold two slots for long."""
    engine = Engine(**options)
    engine.ask("old", tier, 60, prompt)
    engine.step()
    engine.ask("young", tier, 60, prompt)
    engine.run(3)
    return engine


def test_a_request_takes_a_slot_of_a_lower_tier_when_three_quarters_of_its_time_are_gone_and_is_in_time():
    engine = busy()
    asked = engine.now
    engine.ask("urgent", Tier.INTERACTIVE, 5)
    engine.run(7)
    assert engine.preemptions == 0, "a slot may come free by itself"
    engine.run(2)
    assert engine.preemptions == 1
    assert engine.first["urgent"] - asked <= TTFT
    engine.run(200)
    assert engine.ended == {"old", "young", "urgent"}
    engine.assert_all_got_their_own_tokens()


def test_nobody_makes_room_for_an_equal_or_under_a_policy_without_deadlines():
    for tier, policy in (
        (Tier.INTERACTIVE, "slo"),
        (Tier.BATCH, "fcfs"),
        (Tier.BATCH, "priority"),
        (Tier.BATCH, "sjf"),
    ):
        engine = busy(tier, policy=policy)
        engine.ask("urgent", Tier.INTERACTIVE, 5)
        engine.run(200)
        assert engine.preemptions == 0


def test_more_than_a_steps_work_is_never_thrown_away():
    engine = Engine(budget=8)
    for name in ("old", "young"):
        engine.ask(name, Tier.BATCH, 60, prompt=20)
    engine.run(10)
    engine.ask("urgent", Tier.INTERACTIVE, 5)
    engine.run(12)
    assert engine.preemptions == 0


def test_the_oldest_never_makes_room():
    engine = Engine(batch=1)
    engine.ask("old", Tier.BATCH, 60)
    engine.step()
    engine.ask("urgent", Tier.INTERACTIVE, 5)
    engine.run(30)
    assert engine.preemptions == 0


def test_under_a_flood_of_urgent_requests_a_sequence_makes_room_twice_at_most():
    engine = busy()
    for number in range(400):
        if number % 4 == 0:
            engine.ask(f"urgent{number}", Tier.INTERACTIVE, 6)
        engine.step()
    assert 1 <= engine.preemptions <= 4
    assert {"old", "young"} <= engine.ended


def test_nobody_is_thrown_out_where_the_blocks_that_come_free_are_too_few_for_others_share_the_rest():
    engine = busy(prompt=32, caching=True, budget=64, blocks=18)
    young = engine.core.scheduler.running[1].block_table
    engine.ask("urgent", Tier.INTERACTIVE, 5, prompt=40, token=9)
    engine.run(9)
    assert len(young) >= 10, "as many as the urgent one needs, but seven are of the prompt that the other one has too"
    assert engine.preemptions == 0


def test_further_answers_to_a_prompt_throw_nobody_out_for_their_client_has_its_first_token():
    engine = busy(batch=3)
    engine.ask("several", Tier.INTERACTIVE, 40, n=3)
    engine.run(20)
    assert "several" in engine.first
    assert engine.preemptions == 0


def test_a_tenant_takes_slots_of_its_own_and_of_one_that_holds_more_by_weight_and_of_nobody_else():
    for holder, weight, preemptions in (("ours", 1.0, 1), ("theirs", 1.0, 0), ("theirs", 0.25, 1)):
        engine = Engine(batch=4)
        for name, tenant, share in (("old", "ours", 1.0), ("young", holder, weight), ("third", "ours", 1.0)):
            tier = Tier.BATCH if name == "young" else Tier.INTERACTIVE
            engine.ask(name, tier, 60, tenant=tenant, weight=share)
            engine.step()
        engine.ask("fourth", Tier.INTERACTIVE, 60, tenant="ours")
        engine.ask("urgent", Tier.INTERACTIVE, 5, tenant="ours")
        engine.run(10)
        assert engine.preemptions == preemptions, (holder, weight)


def full_pool(prompts, spare=0, last=Tier.BATCH, budget=192, **options):
    """Sequences that hold all blocks, of 16 tokens, but one for each other one and the spare; slots are free."""
    blocks = sum(-(-prompt // 16) for prompt in prompts) + len(prompts) - 1 + spare
    engine = Engine(batch=8, blocks=blocks, block_size=16, budget=budget, **options)
    for number, prompt in enumerate(prompts):
        tier = Tier.BATCH if number < len(prompts) - 1 else last
        engine.ask(str(number), tier, 60, prompt, token=20 + number)
        engine.run(2)
    assert len(engine.core.scheduler.running) == len(prompts)
    return engine


def test_where_slots_are_free_but_blocks_are_not_the_urgent_one_takes_the_blocks_of_one_and_is_in_time():
    engine = full_pool([82, 66, 98])
    asked = engine.now
    engine.ask("urgent", Tier.INTERACTIVE, 5, prompt=40)
    engine.run(10)
    assert engine.first["urgent"] - asked <= TTFT
    assert engine.yields == {"1": 1}
    engine.run(400)
    assert engine.ended == {"0", "1", "2", "urgent"}
    engine.assert_all_got_their_own_tokens()


def test_nobody_makes_room_where_the_urgent_one_fits():
    engine = full_pool([82, 66], spare=6)
    engine.ask("urgent", Tier.INTERACTIVE, 5, prompt=40)
    engine.run(10)
    assert "urgent" in engine.first
    assert engine.yields == {}


def test_no_block_of_others_is_counted_where_the_urgent_one_fits(monkeypatch):
    scheduler = full_pool([82, 66], spare=6).core.scheduler
    urgent = sequence("urgent", prompt=40, tier=Tier.INTERACTIVE)
    monkeypatch.setattr(scheduler.blocks, "num_freed_by", None)
    assert cheapest_victims(urgent, scheduler.running, scheduler.tables, 3, 192) == []


def test_of_those_whose_blocks_are_enough_the_one_yields_that_has_least_to_compute_anew():
    engine = full_pool([4, 98, 82, 66])
    engine.ask("urgent", Tier.INTERACTIVE, 1, prompt=20)
    engine.run(10)
    assert engine.yields == {"3": 1}


def test_several_make_room_where_one_does_not_free_enough():
    engine = full_pool([34, 50, 50, 50, 34], budget=256)
    asked = engine.now
    engine.ask("urgent", Tier.INTERACTIVE, 5, prompt=100)
    engine.run(10)
    assert engine.first["urgent"] - asked <= TTFT
    assert sum(engine.yields.values()) == 2
    engine.run(600)
    assert engine.ended == {*"01234", "urgent"}
    engine.assert_all_got_their_own_tokens()


def test_nobody_makes_room_where_what_several_would_free_is_too_little_or_costs_more_than_a_steps_work():
    for prompts, budget in (([200, 4, 4], 192), ([34, 50, 50, 50, 34], 100)):
        engine = full_pool(prompts, budget=budget)
        engine.ask("urgent", Tier.INTERACTIVE, 5, prompt=100)
        engine.run(10)
        assert engine.yields == {}


def test_what_is_parked_in_host_memory_is_not_thrown_away_so_it_may_be_more_than_a_steps_work():
    for swap, yields in ((20, {"1": 1}), (0, {})):
        engine = full_pool([4, 130, 130], budget=100, swap=swap, by_token=0.002, copying=0.0001)
        engine.ask("urgent", Tier.INTERACTIVE, 1, prompt=20)
        engine.run(8)
        assert engine.yields == yields


def test_when_the_pool_runs_out_an_urgent_one_keeps_its_blocks_longer_than_those_of_a_lower_tier():
    engine = full_pool([66, 66, 66, 66])
    engine.ask("urgent", Tier.INTERACTIVE, 60)
    engine.run(100)
    assert "urgent" in engine.ended
    assert engine.preemptions >= 2, "one made room, and another one was thrown out when the pool ran out"
    assert engine.preempted.isdisjoint({"urgent"})


@pytest.mark.parametrize(("tier", "pressing"), [(Tier.INTERACTIVE, None), (Tier.BATCH, "urgent")])
def test_an_urgent_one_does_not_pass_one_of_its_own_tier_that_waits_to_be_resumed(tier, pressing):
    line = fill(line_of("slo"), sequence("preempted", tier=tier))
    preempted = line.take(0.0)
    preempted.preemptions = 1
    line.put_back(preempted, 0.0)
    fill(line, sequence("urgent", tier=Tier.INTERACTIVE))
    taken = line.take_pressing(0.9 * TARGETS[Tier.INTERACTIVE])
    assert (taken and taken.request_id) == pressing


requests = st.fixed_dictionaries(
    {
        "tier": st.sampled_from(list(Tier)),
        "output": st.integers(1, 25),
        "prompt": st.integers(1, 12),
        "token": st.sampled_from([7, 9]),
        "n": st.sampled_from([1, 1, 1, 3]),
        "tenant": st.sampled_from("ab"),
    }
)
arrivals = st.lists(st.tuples(st.integers(0, 40), requests), min_size=1, max_size=25)
machines = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 6),
        "blocks": st.integers(10, 40),
        "caching": st.booleans(),
        "swap": st.sampled_from([0, 8]),
        "by_token": st.sampled_from([0.0, 0.001]),
    }
)


@settings(max_examples=80)
@given(arrivals, machines)
def test_whoever_makes_room_everybody_finishes_with_their_own_tokens(arrivals, machine):
    engine = Engine(**machine)
    for step in range(41):
        for number, (at, request) in enumerate(arrivals):
            if at == step:
                engine.ask(str(number), **request)
        engine.step()
        running = engine.core.scheduler.running
        assert all(one.yields <= MAX_YIELDS for one in [*running, *engine.core.scheduler.waiting])
    for _ in range(3_000):
        if not engine.core.has_work:
            break
        engine.step()
    assert {name for name, _ in engine.got} == engine.ended
    lengths = {
        (str(number), index): one["output"] for number, (_, one) in enumerate(arrivals) for index in range(one["n"])
    }
    assert {key: len(tokens) for key, tokens in engine.got.items()} == lengths
    engine.assert_all_got_their_own_tokens()
