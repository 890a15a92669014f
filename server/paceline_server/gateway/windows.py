"""Counters of what was used lately: the last minute, and the day. Pure: time is a parameter. Used by `allowance`.

A fixed window lets through twice its limit around its edge. These windows slide, in slices of a second: an amount
counts until its whole slice is a minute old, so that no 60 seconds ever hold more than the limit, at the price of up to
one second more of waiting. Memory is one number a slice, whatever comes.

Somebody may use more than was known beforehand. What is beyond the limit is a debt, which takes the room in the window
as it becomes free, as if it were used then: until it is paid nothing fits, so that the mean over time keeps the limit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

SLICES = 60
PERIOD_SECONDS = 60.0
DAY_SECONDS = 86_400


@dataclass(slots=True)
class _Slice:
    number: int
    amount: int


class SlidingWindow:
    """At most `limit` in any `PERIOD_SECONDS`.

    Times are seconds on any clock that does not go back.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._slices: deque[_Slice] = deque()  # oldest first
        self._used = 0  # in the slices
        self._debt = 0  # none while there is room

    def used(self, now: float) -> int:
        """What counts now, in the window or as a debt; more than the limit where more was used than was reserved."""
        oldest = _slice_of(now) - SLICES
        while self._slices and self._slices[0].number < oldest:
            gone = self._slices.popleft()
            self._used -= gone.amount
            self._pay(_following(gone.number))
        return self._used + self._debt

    def wait(self, amount: int, now: float) -> float | None:
        """Seconds until `amount` fits; 0 where it fits now, None where it never will."""
        if amount > self.limit:
            return None
        return self._until_gone(self.used(now) + amount - self.limit, now)

    def book(self, amount: int, now: float) -> None:
        """Count an amount from now on, whether or not it fits."""
        self.used(now)
        self._debt += amount
        self._pay(_slice_of(now))

    def refund(self, amount: int, booked_at: float, now: float) -> None:
        """Take back part of what was booked at a time and fitted; what no longer counts needs no refund."""
        self.used(now)
        for one in self._slices:
            if one.number == _slice_of(booked_at):
                one.amount -= amount
                self._used -= amount
        self._pay(_slice_of(now))

    def reset(self, now: float) -> float:
        """Seconds until nothing counts any more, if nothing more comes."""
        return self._until_gone(self.used(now), now)

    def _pay(self, number: int) -> None:
        """Have the debt take what room there is, in a slice that is the newest."""
        paid = min(self._debt, max(0, self.limit - self._used))
        if not paid:
            return
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(_Slice(number, 0))
        self._slices[-1].amount += paid
        self._used += paid
        self._debt -= paid

    def _until_gone(self, amount: int, now: float) -> float:
        """Seconds until so much of what counts no longer does. A debt fills each slice that leaves, a window later."""
        if amount <= 0:
            return 0.0
        turns, rest = divmod(amount - 1, self._used)
        for one in self._slices:
            if rest < one.amount:
                break
            rest -= one.amount
        return _leaves(one.number + turns * (SLICES + 1)) - now


class DailyQuota:
    """At most `limit` from midnight to midnight, UTC. Times are Unix seconds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._day = 0
        self._used = 0

    def left(self, now: float) -> int:
        """What may still be used today; 0 where more was used than was reserved."""
        self._turn(now)
        return max(0, self.limit - self._used)

    def book(self, amount: int, now: float) -> None:
        """Count an amount."""
        self._turn(now)
        self._used += amount

    def refund(self, amount: int, booked_at: float, now: float) -> None:
        """Take back part of what was booked; yesterday's is gone."""
        self._turn(now)
        if _day_of(booked_at) == self._day:
            self._used -= amount

    def _turn(self, now: float) -> None:
        if _day_of(now) > self._day:  # a clock that is set back must not open a day anew
            self._day, self._used = _day_of(now), 0


def seconds_to_midnight(now: float) -> float:
    """Until the next day begins, UTC."""
    return (_day_of(now) + 1) * DAY_SECONDS - now


def _slice_of(now: float) -> int:
    return math.floor(now * SLICES / PERIOD_SECONDS)


def _following(number: int) -> int:
    """The first slice that has the room of another one."""
    return number + SLICES + 1


def _leaves(number: int) -> float:
    """When a slice stops to count: its last moment is a period old."""
    return _following(number) * PERIOD_SECONDS / SLICES


def _day_of(now: float) -> int:
    return math.floor(now / DAY_SECONDS)
