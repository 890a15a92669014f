"""What one tenant may still use: requests and tokens a minute, and tokens a day. Used by `accounts`.

Tokens are reserved when a request is let in, since nobody knows then how many it will use, and settled when it ends.
The prompt is known. For the output the client's own limit is reserved whole, so that it cannot be exceeded. For a
client that names none it is the mean of its tenant's answers without one; where an answer goes on beyond that, its
reservation grows with it. What is then over the limit is the window's debt: the tenant waits until it is paid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, time
from typing import TypeVar

from paceline_server.config.tenants import TenantConfig
from paceline_server.errors import QuotaExceeded, RequestRateExceeded, RequestTooLarge, TokenRateExceeded
from paceline_server.gateway.windows import DailyQuota, SlidingWindow, seconds_to_midnight

FIRST_GUESS_TOKENS = 256
"""Reserved for the output of a tenant's first request, where it names no limit."""

Counter = TypeVar("Counter", SlidingWindow, DailyQuota)

_SMOOTHING = 0.1  # weight of the newest answer in the mean


@dataclass(slots=True, eq=False)
class Reservation:
    """Tokens that a request may use.

    Attributes:
        tokens: as many as are booked; they grow with answers that go on beyond a guess.
        prompt: tokens of the prompt; `output`: those generated so far, of all answers.
        guessed: the client names no limit.
        answers: how many it may give.
        at: when, on the monotonic clock; `at_unix`: on the calendar's.
        minute, day: where they are booked; None where there was no such limit.
    """

    tokens: int
    prompt: int
    output: Callable[[], int]
    guessed: bool
    answers: int
    at: float
    at_unix: float
    minute: SlidingWindow | None
    day: DailyQuota | None


class Allowance:
    """The limits of one tenant, and what it has used of them.

    Args:
        clock: seconds, monotonic.
        calendar: Unix seconds.
    """

    def __init__(
        self,
        tenant: TenantConfig,
        clock: Callable[[], float] = monotonic,
        calendar: Callable[[], float] = time,
    ) -> None:
        self._requests: SlidingWindow | None = None
        self._tokens: SlidingWindow | None = None
        self._day: DailyQuota | None = None
        self.adopt(tenant)
        self._clock = clock
        self._calendar = calendar
        self._mean_output = float(FIRST_GUESS_TOKENS)
        self._guessed: set[Reservation] = set()  # of requests under way

    def adopt(self, tenant: TenantConfig) -> None:
        """Take other limits; what has been used under a limit that stays counts on."""
        self._name = tenant.name
        self._requests = _with_limit(self._requests, tenant.requests_per_minute, SlidingWindow)
        self._tokens = _with_limit(self._tokens, tenant.tokens_per_minute, SlidingWindow)
        self._day = _with_limit(self._day, tenant.daily_tokens, DailyQuota)

    def count_request(self) -> None:
        """Let one more request in; what becomes of it does not matter, so that mistakes are not free.

        Raises:
            RequestRateExceeded: the minute is full.
        """
        if self._requests is None:
            return
        now = self._clock()
        wait = self._requests.wait(1, now)
        if wait:
            raise RequestRateExceeded(
                f"the tenant {self._name} has sent its {self._requests.limit} requests per minute "
                "(requests_per_minute); "
                f"try again in {math.ceil(wait)} s",
                retry_after=wait,
            )
        self._requests.book(1, now)

    def reserve(
        self, prompt: int, asked: int | None, room: int, answers: int = 1, output: Callable[[], int] = lambda: 0
    ) -> Reservation:
        """Set tokens aside for a request.

        Args:
            prompt: tokens of the prompt.
            asked: tokens that the client lets an answer have, or None.
            room: tokens that an answer may have in any case.
            answers: how many the client wants.
            output: tokens that it has generated so far.

        Raises:
            RequestTooLarge: it is over the limit of a minute alone.
            TokenRateExceeded: the minute is full.
            QuotaExceeded: the day is.
        """
        now, unix = self._clock(), self._calendar()
        self._grow(now, unix)
        guessed = asked is None
        tokens = self._guess(prompt, room, answers) if asked is None else prompt + answers * min(room, asked)
        self._refuse_over_minute(tokens, now)
        self._refuse_over_day(tokens, unix)
        made = Reservation(tokens, prompt, output, guessed, answers, now, unix, self._tokens, self._day)
        self._book(tokens, made, now, unix)
        if guessed:
            self._guessed.add(made)
        return made

    def settle(self, reservation: Reservation, prompt: int, output: int) -> None:
        """Count what a request has really used instead of what was reserved.

        Under a limit that came in the meantime nothing is reserved that could be given back.
        """
        now, unix = self._clock(), self._calendar()
        self._guessed.discard(reservation)
        for counter, holder, booked_at, at in (
            (self._tokens, reservation.minute, reservation.at, now),
            (self._day, reservation.day, reservation.at_unix, unix),
        ):
            if counter is not None:
                spare = (reservation.tokens if counter is holder else 0) - prompt - output
                counter.refund(spare, booked_at, at) if spare > 0 else counter.book(-spare, at)
        if output and reservation.guessed:  # a limit of the client's says nothing of answers without one
            self._mean_output += _SMOOTHING * (output / reservation.answers - self._mean_output)

    def headers(self) -> dict[str, str]:
        """The limits of a minute and what is left of them, in OpenAI's words; empty where there are none."""
        now = self._clock()
        found: dict[str, str] = {}
        for kind, window in (("requests", self._requests), ("tokens", self._tokens)):
            if window is not None:
                found[f"x-ratelimit-limit-{kind}"] = str(window.limit)
                found[f"x-ratelimit-remaining-{kind}"] = str(max(0, window.limit - window.used(now)))
                found[f"x-ratelimit-reset-{kind}"] = _duration(window.reset(now))
        return found

    def _guess(self, prompt: int, room: int, answers: int) -> int:
        """Tokens that a request without a limit of its client's may use; none that fits a minute is refused for it."""
        tokens = prompt + answers * min(room, math.ceil(self._mean_output))
        return tokens if self._tokens is None else max(prompt, min(tokens, self._tokens.limit))

    def _grow(self, now: float, unix: float) -> None:
        """Book what answers under way have generated beyond the guess."""
        for one in self._guessed:
            beyond = one.prompt + one.output() - one.tokens
            if beyond > 0:
                one.tokens += beyond
                self._book(beyond, one, now, unix)

    def _book(self, tokens: int, reservation: Reservation, now: float, unix: float) -> None:
        """Count tokens under those of its limits that are still in force."""
        if reservation.minute is not None and reservation.minute is self._tokens:
            reservation.minute.book(tokens, now)
        if reservation.day is not None and reservation.day is self._day:
            reservation.day.book(tokens, unix)

    def _refuse_over_minute(self, tokens: int, now: float) -> None:
        if self._tokens is None:
            return
        limit = f"the tenant {self._name} has {self._tokens.limit} tokens per minute (tokens_per_minute)"
        wait = self._tokens.wait(tokens, now)
        if wait is None:
            raise RequestTooLarge(
                f"{limit}, and this request alone may use {tokens}: shorten the prompt or lower max_tokens"
            )
        if wait:
            raise TokenRateExceeded(
                f"{limit}, {self._tokens.used(now)} are used or reserved, and this request may use {tokens}; "
                f"try again in {math.ceil(wait)} s",
                retry_after=wait,
            )

    def _refuse_over_day(self, tokens: int, unix: float) -> None:
        if self._day is not None and tokens > self._day.left(unix):
            left = self._day.left(unix)
            raise QuotaExceeded(
                f"the tenant {self._name} has {self._day.limit} tokens a day (daily_tokens), {left} are left, and "
                f"this request may use {tokens}; the day ends at midnight UTC",
                retry_after=seconds_to_midnight(unix),
            )


def _with_limit(counter: Counter | None, limit: int | None, make: Callable[[int], Counter]) -> Counter | None:
    if limit is None:
        return None
    if counter is None:
        return make(limit)
    counter.limit = limit
    return counter


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 7s, 6m0s."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
