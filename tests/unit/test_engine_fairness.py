"""Between tenants a line goes by what they have used, and `slo` keeps the last slots for those that hold little."""

import pytest
from waiting_lines import fill, line_of, sequence

from paceline_server.engine.fair_line import FairLine
from paceline_server.engine.fairness import CREDIT, INPUT_COST, QUANTUM, Slots, TokenCounters
from paceline_server.engine.interface import Tier


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


def test_of_very_many_tenants_that_embed_the_one_that_comes_last_is_not_served_alone():
    line = FairLine(
        name=lambda text: f"{text[0]} {text[1]}",
        size=lambda text: text[2],
        arrival=lambda text: 0.0,
        share=lambda text: (text[0], 1.0),
    )
    line.push(("old", "past", 1_000_000))
    line.take(0.0)
    line.push(("old", "next", 0))
    for number in range(5_000):
        tenant = str(number)
        line.push((tenant, "first", 2 * CREDIT))
        line.push((tenant, "second", 2 * CREDIT))
        assert line.take(0.0) == (tenant, "first", 2 * CREDIT)
        assert line.take(0.0) == ("old", "next", 0)
        line.push(("old", "next", 0))
        line.remove(f"{tenant} second")
