"""Batches by request: three limits at once, order kept, nobody lost, and a delay that follows the arrivals."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.engine.dynamic import FifoLine, pop_batch
from paceline_server.engine.window import DelayWindow

BUDGET = 50


@dataclass(frozen=True)
class Item:
    name: str
    tokens: int
    arrival: float = 0.0


def new_line():
    return FifoLine(name=lambda item: item.name, size=lambda item: item.tokens, arrival=lambda item: item.arrival)


def within(places, budget=BUDGET):
    return lambda batch: len(batch) <= places and sum(item.tokens for item in batch) <= budget


@given(sizes=st.lists(st.integers(1, BUDGET), max_size=60), places=st.integers(1, 9))
def test_batches_keep_the_order_and_both_limits_and_lose_nobody(sizes, places):
    line, left = new_line(), []
    items = [Item(str(number), size) for number, size in enumerate(sizes)]
    for item in items:
        line.push(item)
    while len(line):
        batch = pop_batch(line, within(places), 0.0)
        assert within(places)(batch)
        following = items[len(left) + len(batch) : len(left) + len(batch) + 1]
        assert not following or not within(places)(batch + following), "a batch that could have been larger"
        left += batch
        assert line.num_tokens == sum(sizes[len(left) :])
    assert left == items


def test_what_overflows_stands_first_again():
    line = new_line()
    for name, tokens in (("a", 30), ("b", 30), ("c", 1)):
        line.push(Item(name, tokens))
    assert [item.name for item in pop_batch(line, within(8), 0.0)] == ["a"]
    assert [item.name for item in pop_batch(line, within(8), 0.0)] == ["b", "c"]


def test_one_that_fits_no_batch_is_our_bug_and_not_an_endless_loop():
    line = new_line()
    line.push(Item("huge", BUDGET + 1))
    with pytest.raises(AssertionError, match="fits no batch"):
        pop_batch(line, within(8), 0.0)


def test_one_that_is_taken_out_is_in_no_batch():
    line = new_line()
    for name in "abc":
        line.push(Item(name, 1))
    assert line.remove("b").name == "b"
    assert line.remove("b") is None
    assert [item.name for item in pop_batch(line, within(8), 0.0)] == ["a", "c"]
    assert line.oldest_arrival is None


def arrivals(window, gap, count=200):
    for number in range(count):
        window.note(number * gap)
    return (count - 1) * gap


def test_low_traffic_does_not_wait():
    window = DelayWindow(cap=0.01, places=8)
    now = arrivals(window, gap=0.02)
    assert window.seconds(now) == 0.0


def test_busy_traffic_waits_as_long_as_the_batch_takes_to_fill_and_no_longer_than_the_cap():
    filling, capped = DelayWindow(cap=0.01, places=8), DelayWindow(cap=0.01, places=64)
    now = arrivals(filling, gap=0.001)
    arrivals(capped, gap=0.001)
    assert filling.seconds(now) == pytest.approx(0.007)
    assert capped.seconds(now) == 0.01


def test_silence_after_busy_traffic_ends_the_waiting():
    window = DelayWindow(cap=0.01, places=8)
    now = arrivals(window, gap=0.001)
    assert window.seconds(now + 0.011) == 0.0


def test_nothing_is_known_before_the_second_arrival_so_the_first_one_does_not_wait():
    window = DelayWindow(cap=0.01, places=8)
    assert window.seconds(0.0) == 0.0
    window.note(0.0)
    assert window.seconds(0.0) == 0.0


def test_a_fixed_window_is_always_the_cap_and_a_full_batch_never_waits():
    window = DelayWindow(cap=0.01, places=8, adaptive=False)
    assert window.due(5.0, 5.0, full=False) == 5.01
    assert window.due(5.0, 5.0, full=True) == 5.0


@given(
    gaps=st.lists(st.floats(0.0, 1.0), max_size=50),
    cap=st.floats(0.0, 0.1),
    places=st.integers(1, 64),
    later=st.floats(0.0, 1.0),
)
def test_nobody_is_made_to_wait_longer_than_the_cap(gaps, cap, places, later):
    window, now = DelayWindow(cap, places), 0.0
    for gap in gaps:
        now += gap
        window.note(now)
        assert now <= window.due(now, now + later, full=False) <= now + cap


@given(
    gaps=st.lists(st.tuples(st.floats(0.0, 0.02), st.integers(1, BUDGET)), min_size=1, max_size=40),
    cap=st.floats(0.0, 0.01),
    service=st.floats(0.0, 0.05),
)
def test_waiting_is_bounded_by_the_cap_and_the_batches_ahead(gaps, cap, service):
    """One server with a fixed time per batch: nobody waits for more than the batches of those before it and a cap."""
    line, window, now, ahead = new_line(), DelayWindow(cap, 4), 0.0, {}
    coming, time = [], 0.0
    for number, (gap, tokens) in enumerate(gaps):
        time += gap
        coming.append(Item(str(number), tokens, time))
    served = 0
    while served < len(gaps):
        while coming and coming[0].arrival <= now:
            window.note(coming[0].arrival)
            line.push(coming[0])
            ahead[coming.pop(0).name] = len(line)
        due = None if line.oldest_arrival is None else window.due(line.oldest_arrival, now, full=len(line) >= 4)
        if due is None or due > now:
            now = min(time for time in (due, coming[0].arrival if coming else None) if time is not None)
            continue
        for item in pop_batch(line, within(4), now):
            assert now - item.arrival <= cap + (ahead[item.name] + 1) * service + 1e-9
            served += 1
        now += service
