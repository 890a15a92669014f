"""What a tenant may use: reserved, settled, and refused until it has it again."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_server.config.tenants import TenantConfig
from paceline_server.errors import QuotaExceeded, RequestRateExceeded, RequestTooLarge, TokenRateExceeded
from paceline_server.gateway.allowance import FIRST_GUESS_TOKENS, Allowance


class World:
    """An allowance and its clocks."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        tenant = TenantConfig.model_validate({"name": "a", "anonymous": True, **limits})
        self.allowance = Allowance(tenant, clock=lambda: self.now, calendar=lambda: self.now)


def test_the_limit_of_the_client_is_reserved_and_what_was_not_used_comes_back() -> None:
    world = World(tokens_per_minute=100)
    first = world.allowance.reserve(10, 60, 200)
    with pytest.raises(TokenRateExceeded, match="70 are used or reserved, and this request may use 40"):
        world.allowance.reserve(10, 30, 200)
    world.allowance.settle(first, 10, 5)
    assert world.allowance.headers()["x-ratelimit-remaining-tokens"] == "85"
    world.allowance.reserve(10, 30, 200)


def test_without_a_limit_of_the_client_the_tenants_own_mean_is_reserved() -> None:
    world = World(tokens_per_minute=10_000)
    reserved = world.allowance.reserve(10, None, 100_000)
    assert reserved.tokens == 10 + FIRST_GUESS_TOKENS
    world.allowance.settle(reserved, 10, 20)
    for _ in range(60):
        world.now += 100.0
        world.allowance.settle(world.allowance.reserve(10, None, 100_000), 10, 20)
    assert world.allowance.reserve(10, None, 100_000).tokens == pytest.approx(31, abs=1)
    assert world.allowance.reserve(10, None, 5).tokens == 15


def test_each_answer_of_a_request_is_reserved_for_and_the_mean_is_that_of_one() -> None:
    world = World(tokens_per_minute=100_000)
    assert world.allowance.reserve(10, 60, 200, answers=3).tokens == 190
    assert world.allowance.reserve(10, 600, 200, answers=3).tokens == 610
    for _ in range(60):
        world.now += 100.0
        world.allowance.settle(world.allowance.reserve(10, None, 5000, answers=4), 10, 80)
    assert world.allowance.reserve(10, None, 5000).tokens == pytest.approx(31, abs=1)


def test_what_is_used_beyond_the_reservation_keeps_the_next_one_waiting_until_the_limit_has_made_up_for_it() -> None:
    """Three minutes' tokens and a few more were used, so three minutes pass."""
    world = World(tokens_per_minute=300, daily_tokens=10_000)
    world.allowance.settle(world.allowance.reserve(10, None, 5000), 10, 900)
    for world.now in (0.0, 61.1, 182.9):
        with pytest.raises(TokenRateExceeded) as caught:
            world.allowance.reserve(1, 1, 10)
        assert caught.value.retry_after == pytest.approx(183.0 - world.now)
    world.now = 183.1
    world.allowance.reserve(1, 1, 10)


def test_answers_that_their_client_keeps_short_say_nothing_of_those_without_a_limit() -> None:
    """Else a few of one token would open the door for hundreds of the context's length."""
    world = World(tokens_per_minute=10_000)
    for _ in range(60):
        world.allowance.settle(world.allowance.reserve(10, 1, 8000), 10, 1)
    assert world.allowance.reserve(10, None, 8000).tokens == 10 + FIRST_GUESS_TOKENS


def test_an_answer_counts_beyond_its_guess_while_it_goes_on() -> None:
    world, generated = World(tokens_per_minute=1000, daily_tokens=10_000), [0]
    running = world.allowance.reserve(10, None, 5000, output=lambda: generated[0])
    generated[0] = 890
    with pytest.raises(TokenRateExceeded, match="900 are used or reserved"):
        world.allowance.reserve(50, 51, 5000)
    world.allowance.reserve(50, 50, 5000)
    world.allowance.settle(running, 10, 900)
    assert world.allowance.headers()["x-ratelimit-remaining-tokens"] == "0"
    world.allowance.adopt(TenantConfig(name="a", anonymous=True, daily_tokens=10_000))
    with pytest.raises(QuotaExceeded, match="8990 are left"):
        world.allowance.reserve(10, 8981, 10_000)


@pytest.mark.parametrize("before", [{}, {"daily_tokens": 5_000, "tokens_per_minute": 5_000}], ids=["none", "others"])
def test_a_limit_that_comes_while_a_request_runs_is_not_raised_by_what_it_gives_back(before: dict[str, int]) -> None:
    world = World(**before)
    running = world.allowance.reserve(10, 4_000, 4_000)
    for limits in ({}, {"daily_tokens": 100, "tokens_per_minute": 100}):
        world.allowance.adopt(TenantConfig.model_validate({"name": "a", "anonymous": True, **limits}))
    world.allowance.reserve(10, 10, 200)
    world.allowance.settle(running, 10, 20)
    assert world.allowance.headers()["x-ratelimit-remaining-tokens"] == "50"
    world.now += 61.0
    with pytest.raises(QuotaExceeded, match="50 are left"):
        world.allowance.reserve(10, 41, 200)


def test_a_guess_refuses_nothing_that_may_fit_and_a_wish_that_cannot_is_refused_for_good() -> None:
    world = World(tokens_per_minute=50)
    assert world.allowance.reserve(10, None, 1000).tokens == 50
    for prompt, asked in ((10, 41), (51, None)):
        with pytest.raises(RequestTooLarge, match="shorten the prompt or lower max_tokens") as caught:
            World(tokens_per_minute=50).allowance.reserve(prompt, asked, 1000)
        assert caught.value.retry_after is None
        assert caught.value.headers["x-should-retry"] == "false"


def test_the_day_is_refused_until_midnight_and_counts_what_was_used() -> None:
    world = World(daily_tokens=100)
    world.now = 80_000.0
    world.allowance.settle(world.allowance.reserve(10, 80, 200), 10, 40)
    with pytest.raises(QuotaExceeded, match="50 are left, and this request may use 60") as caught:
        world.allowance.reserve(10, 50, 200)
    assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")
    assert caught.value.retry_after == 6400
    world.now = 86_400.0
    world.allowance.reserve(10, 50, 200)


def test_a_refusal_by_one_limit_takes_nothing_of_the_other() -> None:
    world = World(tokens_per_minute=1000, daily_tokens=50)
    for _ in range(5):
        with pytest.raises(QuotaExceeded):
            world.allowance.reserve(10, 100, 200)
    assert world.allowance.headers()["x-ratelimit-remaining-tokens"] == "1000"


def test_requests_that_are_refused_do_not_push_the_next_chance_away() -> None:
    world = World(requests_per_minute=2)
    for _ in range(2):
        world.allowance.count_request()
    for world.now in range(1, 61):
        with pytest.raises(RequestRateExceeded) as caught:
            world.allowance.count_request()
        assert caught.value.retry_after == 61 - world.now
    world.now = 61
    world.allowance.count_request()


def test_the_reset_is_written_as_openai_does() -> None:
    world = World(requests_per_minute=2)
    assert world.allowance.headers()["x-ratelimit-reset-requests"] == "0s"
    world.allowance.count_request()
    assert world.allowance.headers()["x-ratelimit-reset-requests"] == "1m1s"
    world.now = 30.0
    assert world.allowance.headers()["x-ratelimit-reset-requests"] == "31s"
