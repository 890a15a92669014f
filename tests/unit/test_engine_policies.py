"""The waiting lines: who goes first under each policy, and that nobody waits without end."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server.config import SchedulingConfig
from paceline_server.engine.fairness import CREDIT, INPUT_COST, QUANTUM, Slots, TokenCounters
from paceline_server.engine.interface import GenerationRequest, Tier
from paceline_server.engine.policies import ttft_targets, waiting_line
from paceline_server.engine.queue import Backlog
from paceline_server.engine.sequence import Sequence

POLICIES = ("slo", "fcfs", "priority", "sjf")
TARGETS = ttft_targets(SchedulingConfig().tiers)
PROMOTE_AFTER = 10.0

numbers = iter(range(1, 1 << 60))


def line_of(policy):
    scheduling = SchedulingConfig(policy=policy, promote_after_seconds=PROMOTE_AFTER)
    return waiting_line(scheduling, cached_tokens=lambda one: 0)


def sequence(name, arrival=0.0, prompt=4, max_tokens=4, **options):
    request = GenerationRequest(name, (1,) * prompt, max_tokens, **options)
    return Sequence(request, arrival, max_tokens, number=next(numbers))


def fill(line, *sequences):
    for one in sequences:
        line.push(one, one.arrival)
    return line


def drain(line, now=0.0):
    order = []
    while (one := line.take(now)) is not None:
        order.append(one.request_id)
    assert len(line) == line.num_tokens == 0
    return order


def test_fcfs_serves_in_order_of_arrival():
    line = fill(line_of("fcfs"), sequence("a", 0.0, prompt=50), sequence("b", 0.0), sequence("c", 1.0, priority=-9))
    assert drain(line) == ["a", "b", "c"]


def test_priority_serves_smaller_numbers_first_until_a_larger_one_has_waited_for_its_levels():
    line = fill(line_of("priority"), sequence("low", 0.0, priority=2), sequence("high", 5.0, priority=0))
    fill(line, sequence("late", 21.0, priority=0))
    assert drain(line) == ["high", "low", "late"]


def test_sjf_serves_the_shortest_job_first_until_a_longer_one_has_waited_for_its_tokens():
    line = fill(line_of("sjf"), sequence("long", 0.0, prompt=400, max_tokens=200), sequence("short", 1.0))
    fill(line, sequence("late", 7.0))
    assert drain(line) == ["short", "long", "late"]


def test_slo_serves_the_more_urgent_tier_first():
    line = fill(line_of("slo"), *(sequence(tier.value, tier=tier) for tier in reversed(Tier)))
    assert drain(line) == ["interactive", "standard", "batch"]


def test_slo_serves_the_earliest_deadline_first_inside_a_tier():
    line = fill(line_of("slo"), sequence("first", 0.0), sequence("second", 0.1), sequence("hurried", 0.2, timeout=0.2))
    assert drain(line, now=0.2) == ["hurried", "first", "second"]


def test_slo_serves_those_that_can_be_in_time_before_the_late_but_for_each_fourth_time():
    line = fill(line_of("slo"), *(sequence(f"late{index}", 0.0) for index in range(3)))
    fill(line, *(sequence(f"fresh{index}", 2.0) for index in range(7)))
    order = drain(line, now=2.0)
    assert [name[:-1] for name in order] == 3 * ["fresh"] + ["late"] + 3 * ["fresh"] + ["late", "fresh", "late"]


def test_slo_gives_each_fourth_turn_to_what_is_overdue_whatever_its_tier():
    line = fill(line_of("slo"), sequence("batch", 0.0, tier=Tier.BATCH), sequence("standard", 1.0))
    fill(line, *(sequence(f"fresh{index}", 30.0, tier=Tier.INTERACTIVE) for index in range(8)))
    order = drain(line, now=30.0)
    assert (order[3], order[7]) == ("standard", "batch"), "overdue since 11.5 s and since 25 s"
    assert all(name.startswith("fresh") for name in order[:3] + order[4:7] + order[8:])


def test_slo_lets_nothing_that_is_merely_late_pass_a_more_urgent_tier():
    line = fill(line_of("slo"), sequence("late", 0.0))
    fill(line, *(sequence(f"fresh{index}", 9.0, tier=Tier.INTERACTIVE) for index in range(5)))
    assert drain(line, now=9.0)[-1] == "late", "it is overdue after 10.5 s"


def test_slo_serves_tenants_by_what_they_have_used_and_not_by_how_much_they_send():
    line = line_of("slo")
    fill(line, *(sequence(f"flood{index}", 0.0, prompt=300, tenant="flood") for index in range(20)))
    fill(line, *(sequence(f"quiet{index}", 1.0, prompt=300, tenant="quiet") for index in range(4)))
    order = []
    for _ in range(8):
        one = line.take(1.0)
        line.charge(one, INPUT_COST * one.remaining)
        order.append(one.request.tenant)
    assert order.count("quiet") == 4
    assert {"flood", "quiet"} == set(order[:2]) == set(order[2:4]) == set(order[4:6])


def test_slo_gives_an_interactive_burst_a_head_start_over_another_tenants_batch_and_no_more():
    line = line_of("slo")
    fill(line, *(sequence(f"bulk{index}", prompt=1024, tenant="bulk", tier=Tier.BATCH) for index in range(40)))
    line.charge(line.take(0.0), 1024.0)
    fill(line, *(sequence(f"talk{index}", prompt=1024, tenant="talk", tier=Tier.INTERACTIVE) for index in range(40)))
    order = []
    for _ in range(16):
        one = line.take(0.0)
        line.charge(one, INPUT_COST * one.remaining)
        order.append(one.request.tenant)
    assert order[:8] == ["talk"] * 8, "32 quanta of 256 are eight such prompts"
    assert 3 <= order[8:].count("bulk") <= 5, "then they share"


def test_slo_never_lets_the_aged_work_of_a_flood_pass_another_tenants():
    line = fill(line_of("slo"), *(sequence(f"old{index}", 0.0, prompt=500, tenant="flood") for index in range(50)))
    for index in range(10):
        fill(line, sequence(f"new{index}", 30.0 + index, prompt=500, tenant="quiet"))
        one = line.take(30.0 + index)
        line.charge(one, INPUT_COST * one.remaining)
        two = line.take(30.0 + index)
        line.charge(two, INPUT_COST * two.remaining)
        assert "quiet" in (one.request.tenant, two.request.tenant)


def test_slo_gives_a_tenant_of_three_times_the_weight_three_times_the_tokens():
    line = line_of("slo")
    fill(line, *(sequence(f"a{index}", prompt=100, tenant="a", weight=3.0) for index in range(200)))
    fill(line, *(sequence(f"b{index}", prompt=100, tenant="b") for index in range(200)))
    served = {"a": 0, "b": 0}
    for _ in range(160):
        one = line.take(0.0)
        line.charge(one, INPUT_COST * one.remaining)
        served[one.request.tenant] += 1
    assert served["a"] == pytest.approx(3 * served["b"], rel=0.1)


def test_slo_lifts_a_tenant_that_was_idle_to_the_least_used_of_those_that_wait_less_a_small_credit():
    line = fill(line_of("slo"), *(sequence(f"busy{index}", prompt=1024, tenant="busy") for index in range(60)))
    for _ in range(30):
        line.charge(line.take(0.0), 1024.0)
    fill(line, *(sequence(f"idle{index}", prompt=1024, tenant="idle") for index in range(30)))
    order = []
    for _ in range(22):
        one = line.take(0.0)
        line.charge(one, 1024.0)
        order.append(one.request.tenant)
    assert order.count("idle") == 11 + CREDIT / 1024 / 2, "not the thirty turns that it missed while idle"


def test_slo_lifts_a_tenant_that_comes_to_an_empty_line_to_the_one_that_was_served_last():
    line = fill(line_of("slo"), sequence("first", tenant="busy"), sequence("second", tenant="busy"))
    line.charge(line.take(0.0), 100 * QUANTUM)
    line.take(0.0)
    fill(line, sequence("newcomer", tenant="idle"))
    assert line._counters.used("idle") == 100 * QUANTUM - CREDIT


def test_slo_keeps_the_last_slots_for_tenants_that_hold_less_than_their_share():
    line = fill(line_of("slo"), *(sequence(f"flood{index}", tenant="flood") for index in range(9)))
    held = [line.take(0.0) for _ in range(6)]
    assert line.take(0.0, scarce=True).request.tenant == "flood", "it is alone"
    line.charge(held[0], 10 * QUANTUM)
    fill(line, sequence("quiet", 1.0, tenant="quiet"))
    quiet = line.take(1.0, scarce=True)
    assert quiet.request_id == "quiet"
    assert line.take(1.0, scarce=True) is None, "the last ones are kept"
    assert line.take(1.0).request.tenant == "flood"
    line.note_end(quiet)
    fill(line, sequence("flood99", 12.0, tenant="flood"))
    assert line.take(12.0, scarce=True).request.tenant == "flood", "the other one has been gone for ten seconds"


def test_slo_gives_the_last_slots_to_tenants_that_sent_nothing_for_long_but_still_wait():
    line = fill(line_of("slo"), sequence("old", 0.0, tenant="old"), sequence("held", 0.0, tenant="held"))
    assert line.take(0.0).request_id == "held"
    fill(line, sequence("new", 30.0, tenant="new"))
    line.charge(sequence("earlier", tenant="new"), 10 * QUANTUM)
    assert line.take(30.0, scarce=True).request_id == "old"


def test_slo_never_lets_a_tenant_pass_for_want_of_slots_whose_turn_it_is_by_what_was_used():
    line = fill(line_of("slo"), *(sequence(f"long{index}", tenant="long") for index in range(9)))
    held = [line.take(0.0) for _ in range(4)]
    fill(line, sequence("short", tenant="short"))
    line.charge(held[0], QUANTUM)
    line.charge(sequence("earlier", tenant="short"), 99 * QUANTUM)
    assert line.take(0.0, scarce=True) is None, "it is the turn of the tenant with the long answers"
    assert line.take(0.0).request.tenant == "long"


def holding(**held):
    """Slots of tenants, each with its weight and how many it holds; something waits for each."""
    slots = Slots()
    for tenant, (weight, count) in held.items():
        slots.note(tenant, weight, 0.0)
        for _ in range(count):
            slots.take(tenant, weight, 0.0)
    return slots


def may(slots, tenant, now=0.0, waits=lambda tenant: True):
    return slots.may_take_last(tenant, now, waits)


def test_the_last_slots_are_shared_by_weight():
    slots = holding(big=(3.0, 6), small=(1.0, 2))
    assert may(slots, "small"), "a quarter of nine is more than two"
    assert may(slots, "big")
    slots.take("small", 1.0, 0.0)
    assert not may(slots, "small")
    slots.give_back("small")
    assert may(slots, "small")


def test_what_one_tenant_leaves_of_its_share_another_one_may_take_before_the_one_that_holds_most():
    slots = holding(flood=(1.0, 30), busy=(1.0, 20), quiet=(1.0, 1))
    assert may(slots, "quiet")
    assert may(slots, "busy"), "it has its third already, and the flood has more"
    assert not may(slots, "flood")


def test_a_tenant_that_waits_or_holds_slots_is_active_however_long_ago_its_last_request_came():
    slots = holding(old=(1.0, 0), holder=(1.0, 1))
    for now in (20.0, 40.0, 60.0):
        slots.note("fresh", 1.0, now)
        assert may(slots, "fresh", now, {"fresh", "old"}.__contains__)
        assert may(slots, "old", now, {"fresh", "old"}.__contains__)
    slots.take("fresh", 1.0, 60.0)
    assert not may(slots, "fresh", 60.0, {"fresh", "old"}.__contains__), "it has its third of three slots"


def test_slo_favours_the_prompt_of_a_tenant_that_has_used_less_than_any_that_waits():
    line = fill(line_of("slo"), sequence("waiting", tenant="flood"))
    running = sequence("running", tenant="quiet")
    line.charge(sequence("earlier", tenant="flood"), 4 * QUANTUM)
    assert line.favours(running, 0.0)
    line.charge(running, 4 * QUANTUM)
    assert not line.favours(running, 0.0)
    assert not line_of("fcfs").favours(running, 0.0)


def test_slo_does_not_lift_a_tenant_whose_sequence_only_comes_back():
    line = fill(line_of("slo"), sequence("rich", prompt=10, tenant="rich"), sequence("poor", prompt=10, tenant="poor"))
    line.charge(sequence("earlier", tenant="rich"), 10 * QUANTUM)
    for _ in range(5):
        blocked = line.take(0.0)
        assert blocked.request_id == "poor"
        line.put_back(blocked, 0.0)
    line.charge(sequence("now", tenant="poor"), 5 * QUANTUM)
    assert line.take(0.0).request_id == "poor"


def test_slo_forgets_idle_tenants_when_there_are_very_many():
    counters = TokenCounters()
    for number in range(10_000):
        counters.charge(str(number), 1.0, 1.0)
        counters.forget_idle(lambda tenant: tenant == "7")
    assert len(counters._used) < 5_000
    assert counters.used("7") == 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_preempted_sequence_goes_before_its_equals_and_the_older_one_first(policy):
    line = line_of(policy)
    older, younger = sequence("older", 0.0), sequence("younger", 0.5)
    fill(line, older, younger)
    taken = [line.take(0.5), line.take(0.5)]
    fill(line, sequence("new", 0.0))
    for one in reversed(taken):
        one.preemptions = 1
        line.put_back(one, 1.0)
    assert drain(line, now=1.0) == ["older", "younger", "new"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_does_not_fit_goes_back_to_its_place(policy):
    line = fill(line_of(policy), *(sequence(name, 0.0, tenant=name) for name in "abc"))
    expected = drain(fill(line_of(policy), *(sequence(name, 0.0, tenant=name) for name in "abc")))
    passed = [line.take(0.0), line.take(0.0)]
    for one in passed:
        line.put_back(one, 0.0)
    assert drain(line) == expected


@pytest.mark.parametrize(
    ("policy", "tenant", "bound"),
    [
        ("fcfs", "quiet", 0.1),
        ("priority", "quiet", 60.1),  # three levels of 10 s; half of what comes meanwhile is served meanwhile
        ("sjf", "quiet", 20.1),  # 984 tokens of 10 ms, likewise
        ("slo", "flood", 26.0),  # overdue after 25 s, then each eighth turn at the latest
        ("slo", "quiet", 106.0),  # the head start of 32 quanta of 256 and one more, at 8 tokens a take
    ],
)
def test_nothing_is_passed_for_ever_by_a_flood_of_more_urgent_work(policy, tenant, bound):
    line = line_of(policy)
    victim = sequence("victim", 0.0, prompt=500, max_tokens=500, tier=Tier.BATCH, priority=3, tenant=tenant)
    fill(line, victim)
    tick, taken = 0, None
    while taken is not victim:
        tick += 1
        for index in range(2):  # two come while one is served: the line grows without end
            options = {"tier": Tier.INTERACTIVE, "priority": 0, "tenant": "flood"}
            fill(line, sequence(f"urgent{tick}-{index}", tick / 10, prompt=8, max_tokens=8, **options))
        taken = line.take(tick / 10)
        line.charge(taken, INPUT_COST * taken.remaining)
        assert tick / 10 <= bound


@pytest.mark.parametrize("policy", POLICIES)
def test_the_age_of_the_line_is_that_of_the_one_that_has_waited_longest(policy):
    line = line_of(policy)
    assert line.oldest_arrival is None
    fill(line, sequence("old", 1.0, tier=Tier.BATCH, priority=5), sequence("new", 2.0, tier=Tier.INTERACTIVE))
    assert line.oldest_arrival == 1.0
    line.put_back(line.take(2.0), 2.0)
    assert line.oldest_arrival == 1.0
    line.remove("old")
    assert line.oldest_arrival == 2.0


def test_slo_counts_as_ahead_the_tiers_above_and_what_the_tenants_are_due():
    line = line_of("slo")
    fill(line, sequence("i", prompt=100, tier=Tier.INTERACTIVE, tenant="me"))
    fill(line, *(sequence(f"own{index}", prompt=100, tenant="me") for index in range(3)))
    fill(line, *(sequence(f"flood{index}", prompt=100, tenant="flood") for index in range(50)))
    fill(line, sequence("b", prompt=100, tier=Tier.BATCH, tenant="me"))
    mine = line.ahead_of(sequence("mine", prompt=100, tenant="me"), 0.0)
    assert mine == Backlog(1 + 3 + 4, 100 + 300 + 400, (Tier.INTERACTIVE,)), "as much of the flood as of one's own"
    assert line.ahead_of(sequence("urgent", tier=Tier.INTERACTIVE, tenant="me"), 0.0) == Backlog(1, 100)
    assert line.ahead_of(sequence("other", tier=Tier.BATCH, tenant="flood"), 0.0).requests == 50 + 5
    assert line.ahead_of(sequence("third", tenant="newcomer"), 0.0).requests == 1, "the interactive one"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_ordered_lines_count_as_ahead_what_would_be_taken_before(policy):
    line = fill(line_of(policy), *(sequence(str(n), prompt=10 * n, max_tokens=n, priority=n) for n in (5, 1, 4, 2, 3)))
    newcomer = sequence("new", prompt=30, max_tokens=3, priority=3)
    backlog = line.ahead_of(newcomer, 0.0)
    line.push(newcomer, 0.0)
    order = drain(line)
    before = order[: order.index("new")]
    assert backlog == Backlog(len(before), sum(10 * int(name) for name in before))


class NaiveSlo:
    """The rules of `slo` over a plain list, looked through from end to end."""

    def __init__(self):
        self.waiting: list[Sequence] = []
        self.used: dict[str, float] = {}
        self.floor = 0.0
        self.since_late: dict[tuple[str, int], int] = {}
        self.overdue_had_last: dict[str, bool] = {}
        self.now = 0.0

    def rank(self, one):
        return list(Tier).index(one.request.tier)

    def of(self, tenant):
        return [one for one in self.waiting if one.request.tenant == tenant and not one.preemptions]

    def deadline(self, one):
        return one.arrival + min(TARGETS[one.request.tier], one.request.timeout or 1e9)

    def late(self, one):
        return self.deadline(one) < self.now

    def overdue(self, one):
        return self.deadline(one) + self.rank(one) * PROMOTE_AFTER

    def next_tenant(self):
        def turn(tenant):
            best = min(map(self.rank, self.of(tenant)))
            in_time = [self.deadline(o) for o in self.of(tenant) if self.rank(o) == best and not self.late(o)]
            level = int(self.used.get(tenant, 0.0) / QUANTUM)
            return (level - (32, 16, 0)[best], min(in_time, default=inf), tenant)

        return min({one.request.tenant for one in self.waiting if not one.preemptions}, key=turn, default=None)

    def forget(self, tenant):
        self.since_late = {key: count for key, count in self.since_late.items() if key[0] != tenant}
        self.overdue_had_last.pop(tenant, None)

    def push(self, one, now):
        self.now = now
        tenant = one.request.tenant
        if not self.of(tenant):
            first = self.next_tenant()
            floor = self.floor if first is None else self.used.get(first, 0.0)
            self.used[tenant] = max(self.used.get(tenant, 0.0), floor - CREDIT)
            self.forget(tenant)
        self.put_back(one, now)

    def put_back(self, one, now):
        self.now = now
        if not self.of(one.request.tenant):
            self.forget(one.request.tenant)
        self.waiting.append(one)

    def take(self, now):
        self.now = now
        resumed = [one for one in self.waiting if one.preemptions]
        tenant = self.next_tenant()
        if resumed or tenant is None:
            one = min(resumed, key=lambda one: one.number, default=None)
        else:
            self.floor = max(self.floor, self.used.get(tenant, 0.0))
            one = self.choose(tenant)
        if one is not None:
            self.waiting.remove(one)
        return one

    def choose(self, tenant):
        best = min(map(self.rank, self.of(tenant)))
        tier = [one for one in self.of(tenant) if self.rank(one) == best]
        late, in_time = [one for one in tier if self.late(one)], [one for one in tier if not self.late(one)]
        overdue = [one for one in self.of(tenant) if self.rank(one) > 0 and self.overdue(one) < self.now]
        since = self.since_late.get((tenant, best), 0)
        turn_of_late = bool(late or overdue) and (not in_time or since >= 3)
        self.since_late[tenant, best] = 0 if turn_of_late else since + 1
        if not turn_of_late:
            return min(in_time, key=lambda one: (self.deadline(one), one.number))
        turn_of_overdue = bool(overdue) and (not late or not self.overdue_had_last.get(tenant, False))
        self.overdue_had_last[tenant] = turn_of_overdue
        if turn_of_overdue:
            return min(overdue, key=lambda one: (self.overdue(one), one.number))
        return min(late, key=lambda one: (self.deadline(one), one.number))

    def remove(self, name):
        found = next((one for one in self.waiting if one.request_id == name), None)
        if found is not None:
            self.waiting.remove(found)
        return found


moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.sampled_from(list(Tier)),
            st.sampled_from("xyz"),
            st.sampled_from([None, 0.05, 3.0]),
        ),
        st.tuples(st.just("take"), st.sampled_from([0, 60, 700]), st.booleans(), st.booleans()),
        st.tuples(st.just("remove"), st.integers(1, 30), st.none(), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, 6.0]), st.none(), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(moves)
def test_slo_takes_what_its_rules_say_whatever_has_happened_before(moves):
    line, naive, now, count = line_of("slo"), NaiveSlo(), 0.0, 0
    for move, first, second, third in moves:
        if move == "push":
            count += 1
            one = sequence(str(count), now, tier=first, tenant=second, timeout=third)
            line.push(one, now)
            naive.push(one, now)
        elif move == "take":
            one = line.take(now)
            assert one is naive.take(now)
            if one is not None:
                line.charge(one, float(first))
                naive.used[one.request.tenant] = naive.used.get(one.request.tenant, 0.0) + first
                if second:
                    one.preemptions += third
                    line.put_back(one, now)
                    naive.put_back(one, now)
        elif move == "remove":
            assert line.remove(str(first)) is naive.remove(str(first))
        else:
            now += first
        assert {one.request_id for one in line} == {one.request_id for one in naive.waiting}
        assert line.num_tokens == sum(one.num_tokens for one in naive.waiting)
