"""The waiting lines: who goes first under each policy, and that nobody waits without end."""

import pytest
from waiting_lines import POLICIES, drain, fill, line_of, sequence

from paceline_server.engine.fairness import INPUT_COST
from paceline_server.engine.interface import Tier
from paceline_server.engine.queue import Backlog


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
