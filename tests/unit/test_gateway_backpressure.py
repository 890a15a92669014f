"""The bounded queue counts each request once, and says when to come back."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest

from paceline_server.config import BackpressureConfig
from paceline_server.engine.status import EngineStats
from paceline_server.errors import Overloaded
from paceline_server.gateway.backpressure import Backpressure, Ticket


@dataclass
class World:
    """An engine's numbers and a clock, both set by hand."""

    requests: int = 2
    tokens: int | None = None
    running: int = 2
    stats: EngineStats = field(default_factory=EngineStats)
    now: float = 0.0
    open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        config = BackpressureConfig(max_queued_requests=self.requests, max_queued_tokens=self.tokens)
        self.gate = Backpressure(config, self.running, lambda: self.stats, lambda: self.now)

    def submit(self, prompt_tokens: int = 1) -> Ticket:
        """One more request, taken to the engine."""
        with ExitStack() as attempt:
            ticket = attempt.enter_context(self.gate.enter())
            self.gate.submit(ticket, prompt_tokens)
            self.open.push(attempt.pop_all())
            return ticket

    def step(self, **numbers: int) -> None:
        """The engine reports a step."""
        self.stats = replace(self.stats, steps=self.stats.steps + 1, **numbers)

    def refused(self, prompt_tokens: int = 1) -> Overloaded:
        """The error of one more request."""
        with pytest.raises(Overloaded) as caught:
            self.submit(prompt_tokens)
        return caught.value


def test_an_idle_engine_takes_a_burst_of_what_it_can_run_and_what_may_wait() -> None:
    world = World()
    for _ in range(4):
        world.submit()
    assert world.gate.waiting == 2
    assert world.refused().code == "queue_full"


def test_requests_that_the_engine_reports_are_not_counted_twice() -> None:
    """Two run, one waits: there is room for one more, whatever was submitted how long ago."""
    world = World()
    tickets = [world.submit() for _ in range(3)]
    world.step(running=2, waiting=1)
    world.step()
    assert world.gate.waiting == 1
    for ticket in tickets[:2]:
        world.gate.started(ticket)
    world.submit()
    assert world.gate.waiting == 2
    assert world.refused()


def test_a_request_submitted_during_a_step_still_counts_after_it() -> None:
    """The step's numbers were taken before the engine saw it."""
    world = World(requests=1)
    world.step(running=2)
    world.submit()
    world.step()
    assert world.gate.waiting == 1
    assert world.refused()


def test_leaving_the_queue_gives_the_place_back() -> None:
    world = World(requests=1, running=1)
    world.step(running=1)
    with world.gate.enter():
        assert world.gate.waiting == 1
    assert world.gate.waiting == 0


def test_a_full_queue_of_the_engine_is_full_for_the_gateway() -> None:
    world = World()
    world.step(running=1, waiting=2)
    assert world.refused()


def test_tokens_are_bounded_for_those_that_have_to_wait() -> None:
    """A long prompt on an idle engine does not wait, so it is taken."""
    world = World(requests=10, tokens=100, running=1)
    world.submit(5000)
    world.step(running=1, waiting=0)
    world.step()
    world.submit(60)
    assert world.refused(60).code == "queued_tokens"
    world.submit(40)


def test_the_refused_prompt_leaves_no_tokens_behind() -> None:
    world = World(requests=10, tokens=100, running=1)
    world.step(running=1)
    for _ in range(3):
        with pytest.raises(Overloaded), world.gate.enter() as ticket:
            world.gate.submit(ticket, 101)
    world.submit(100)


def test_retry_after_is_the_time_to_work_off_the_queue() -> None:
    world = World(requests=3, running=1)
    for _ in range(40):
        world.gate.started(world.submit())
        world.now += 5.0
    world.step(running=1, waiting=3)
    assert world.refused().retry_after == 15


def test_retry_after_has_bounds() -> None:
    world = World(requests=1, running=1)
    world.step(running=1, waiting=1)
    assert world.refused().retry_after == 1
    world.stats = EngineStats()
    for _ in range(2):
        world.gate.started(world.submit())
        world.now += 1000.0
    world.step(running=1, waiting=1)
    assert world.refused().retry_after == 60
