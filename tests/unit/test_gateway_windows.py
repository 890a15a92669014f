"""What was used lately is never more than the limit, nor is anybody kept waiting longer than by one slice."""

from __future__ import annotations

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from paceline_server.gateway.windows import (
    DAY_SECONDS,
    PERIOD_SECONDS,
    SLICES,
    DailyQuota,
    SlidingWindow,
    seconds_to_midnight,
)

SLICE = PERIOD_SECONDS / SLICES
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 40, allow_nan=False), st.integers(1, 12)), max_size=60
)  # seconds since the one before, amount


class Reference:
    """Every amount with its time, added up anew each time."""

    def __init__(self) -> None:
        self.booked: list[tuple[float, int]] = []

    def used(self, now: float, period: float) -> int:
        return sum(amount for at, amount in self.booked if now - at < period)


@given(arrivals=ARRIVALS, limit=st.integers(1, 30))
def test_no_sixty_seconds_hold_more_than_the_limit_and_what_fits_a_slice_more_is_let_in(
    arrivals: list[tuple[float, int]], limit: int
) -> None:
    window, reference, now = SlidingWindow(limit), Reference(), 0.0
    for gap, amount in arrivals:
        now += gap
        fits = window.wait(amount, now) == 0.0
        if fits:
            window.book(amount, now)
            reference.booked.append((now, amount))
            assert reference.used(now, PERIOD_SECONDS) <= limit
        else:
            assert reference.used(now, PERIOD_SECONDS + SLICE) + amount > limit, "refused though it would have fitted"


@given(arrivals=ARRIVALS, limit=st.integers(12, 30), amount=st.integers(1, 12))
def test_after_the_wait_that_is_told_it_fits_and_not_a_slice_before(
    arrivals: list[tuple[float, int]], limit: int, amount: int
) -> None:
    window, now = SlidingWindow(limit), 0.0
    for gap, other in arrivals:
        now += gap
        window.book(other, now)  # also beyond the limit, as settling may
    wait = window.wait(amount, now)
    assert wait is not None
    if wait:
        early = deepcopy(window)
        assert early.wait(amount, now + max(0.0, wait - SLICE)) != 0.0
        assert window.wait(amount, now + wait + 1e-6) == 0.0


@given(
    arrivals=st.lists(st.tuples(st.floats(0, 30, allow_nan=False), st.integers(1, 50), st.integers(0, 50)), max_size=40)
)
def test_settling_leaves_what_was_really_used(arrivals: list[tuple[float, int, int]]) -> None:
    """Reserve, then refund at the next arrival: the window agrees with one that knew the amounts from the start."""
    window, knowing, now = SlidingWindow(10_000), SlidingWindow(10_000), 0.0
    pending: tuple[float, int] | None = None
    for gap, reserved, spare in arrivals:
        now += gap
        if pending:
            window.refund(pending[1], pending[0], now)
        spare = min(spare, reserved)
        window.book(reserved, now)
        knowing.book(reserved - spare, now)
        pending = (now, spare)
        assert window.used(now) - spare == knowing.used(now)


@given(
    arrivals=st.lists(
        st.tuples(st.floats(0, 90, allow_nan=False), st.integers(1, 12), st.integers(0, 90)), max_size=60
    ),
    limit=st.integers(12, 30),
)
def test_who_uses_more_than_was_let_in_has_no_more_than_the_limit_a_minute_over_time(
    arrivals: list[tuple[float, int, int]], limit: int
) -> None:
    """Amounts that fit, and what each turns out to use beyond: nothing is let in before the mean allows it."""
    window, total, now = SlidingWindow(limit), 0, 0.0
    for gap, amount, beyond in arrivals:
        now += gap
        if window.wait(amount, now) == 0.0:
            assert total + amount <= limit * (1 + now / PERIOD_SECONDS)
            window.book(amount, now)
            window.book(beyond, now)
            total += amount + beyond


def test_a_debt_is_paid_with_the_room_of_the_minutes_that_follow() -> None:
    window = SlidingWindow(300)
    window.book(910, 0.0)
    assert window.used(0.0) == 910
    assert window.wait(1, 0.0) == 183.0
    assert window.used(61.0) == 610
    assert window.wait(290, 182.9) != 0.0
    assert window.wait(290, 183.0) == 0.0
    assert window.wait(291, 183.0) == 61.0
    assert window.reset(183.0) == 61.0


def test_what_was_reserved_and_not_used_pays_a_debt_at_once() -> None:
    window = SlidingWindow(300)
    window.book(290, 0.0)
    window.book(60, 1.0)
    window.refund(250, 0.0, 2.0)
    assert window.used(2.0) == 100
    assert window.wait(200, 2.0) == 0.0


def test_memory_does_not_grow_with_what_comes() -> None:
    window = SlidingWindow(10**9)
    for tick in range(20_000):
        window.book(1, tick * 0.05)
    window.book(10**12, 1000.0)
    window.used(3000.0)
    assert len(window._slices) <= SLICES + 1


def test_there_is_no_burst_of_twice_the_limit_around_the_edge_of_a_minute() -> None:
    window = SlidingWindow(100)
    window.book(100, 59.9)
    assert window.wait(1, 60.1) != 0.0
    assert window.wait(1, 119.8) != 0.0
    assert window.wait(100, 121.0) == 0.0


def test_more_than_the_limit_never_fits() -> None:
    assert SlidingWindow(10).wait(11, 0.0) is None
    assert SlidingWindow(10).wait(10, 0.0) == 0.0


def test_a_window_that_nothing_counts_in_is_reset() -> None:
    window = SlidingWindow(10)
    assert window.reset(5.0) == 0.0
    window.book(3, 5.5)
    assert window.reset(5.5) == 60.5
    assert window.reset(66.0) == 0.0


def test_a_day_ends_at_midnight_utc() -> None:
    noon = 20_000 * DAY_SECONDS + DAY_SECONDS // 2
    quota = DailyQuota(100)
    quota.book(80, noon)
    assert quota.left(noon) == 20
    assert quota.left(noon + seconds_to_midnight(noon) - 1) == 20
    assert quota.left(noon + seconds_to_midnight(noon)) == 100


def test_what_was_reserved_yesterday_is_not_given_back_today() -> None:
    late = DAY_SECONDS - 1.0
    quota = DailyQuota(100)
    quota.book(50, late)
    quota.book(10, late + 2)
    quota.refund(50, late, late + 3)
    assert quota.left(late + 3) == 90


def test_a_clock_that_is_set_back_over_midnight_opens_no_new_day() -> None:
    quota = DailyQuota(100)
    quota.book(60, DAY_SECONDS + 10.0)
    assert quota.left(DAY_SECONDS - 10.0) == 40
    quota.book(60, DAY_SECONDS + 20.0)
    assert quota.left(DAY_SECONDS + 20.0) == 0
