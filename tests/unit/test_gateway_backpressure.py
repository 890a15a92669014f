"""The bounded queue counts each request once, is shared by weight when it is full, and says when to come back."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server.config import BackpressureConfig, TenantConfig
from paceline_server.engine.status import EngineStats
from paceline_server.errors import Overloaded
from paceline_server.gateway.backpressure import Backpressure
from paceline_server.gateway.shares import Ticket

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5, "d": 0.4}


@dataclass
class World:
    """An engine's numbers and a clock, both set by hand.

    Attributes:
        lost: the tenants of requests whose place went to another one's.
    """

    requests: int = 2
    tokens: int | None = None
    running: int = 2
    stats: EngineStats = field(default_factory=EngineStats)
    now: float = 0.0
    open: ExitStack = field(default_factory=ExitStack)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = BackpressureConfig(max_queued_requests=self.requests, max_queued_tokens=self.tokens)
        self.gate = Backpressure(config, self.running, lambda: self.stats, lambda: self.now)

    def enter(self, attempt: ExitStack, tenant: str) -> Ticket:
        """One more request that is being prepared, until `attempt` is closed."""
        config = TenantConfig(name=tenant, anonymous=True, weight=WEIGHTS[tenant])
        return attempt.enter_context(self.gate.enter(config, lose=lambda: self.lost.append(tenant)))

    def submit(self, prompt_tokens: int = 1, tenant: str = "a") -> Ticket:
        """One more request, taken to the engine."""
        with ExitStack() as attempt:
            ticket = self.enter(attempt, tenant)
            self.gate.submit(ticket, prompt_tokens)
            self.open.push(attempt.pop_all())
            return ticket

    def step(self, **numbers: int) -> None:
        """The engine reports a step."""
        self.stats = replace(self.stats, steps=self.stats.steps + 1, **numbers)

    def refused(self, prompt_tokens: int = 1, tenant: str = "a") -> Overloaded:
        """The error of one more request."""
        with pytest.raises(Overloaded) as caught:
            self.submit(prompt_tokens, tenant)
        return caught.value

    def held(self) -> Counter[str]:
        """Places by tenant."""
        return Counter(ticket.tenant for ticket in self.gate._tickets)

    def placed(self) -> Counter[str]:
        """Places by tenant, without claims to them."""
        return Counter(ticket.tenant for ticket in self.gate._tickets if ticket.placed)

    def tokens_held(self) -> Counter[str]:
        """Prompt tokens by tenant."""
        held: Counter[str] = Counter()
        for ticket in self.gate._tickets:
            held[ticket.tenant] += ticket.prompt_tokens
        return held


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
    world.submit()
    assert world.gate.waiting == 1
    world.open.close()
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
        world.refused(101)
    world.submit(100)


def test_a_tenant_that_fills_the_tokens_keeps_no_other_one_out() -> None:
    """Its newest prompts make room, down to equal shares; then the other one is refused as well."""
    world = World(requests=100, tokens=800, running=0)
    for _ in range(8):
        world.submit(100, tenant="a")
    world.refused(100, tenant="a")
    for _ in range(8):
        world.submit(50, tenant="b")
    assert world.refused(50, tenant="b").code == "queued_tokens"
    assert world.refused(100, tenant="a").code == "queued_tokens"
    assert world.lost == ["a"] * 4


def test_a_prompt_takes_the_room_of_as_many_others_as_it_has_tokens_for() -> None:
    world = World(requests=100, tokens=100, running=0)
    for _ in range(10):
        world.submit(10, tenant="a")
    world.submit(25, tenant="b")
    assert world.lost == ["a"] * 3


def test_no_prompt_makes_way_for_one_that_is_refused_all_the_same() -> None:
    """One is longer than the bound, one has more than its share with what it asks."""
    world = World(requests=100, tokens=100, running=0)
    for _ in range(10):
        world.submit(10, tenant="a")
    world.refused(101, tenant="b")
    world.refused(90, tenant="b")
    assert world.lost == []


def test_tokens_that_the_engine_still_counts_are_not_taken_from_others_again() -> None:
    """Between two steps its numbers have the prompts that were lost; a newcomer takes no more room than it needs."""
    world = World(requests=100, tokens=100, running=0)
    for _ in range(10):
        world.submit(10, tenant="a")
    for _ in range(2):
        world.step(waiting=10, waiting_tokens=100)
    for _ in range(3):
        world.submit(10, tenant="b")
    assert world.lost == ["a"] * 3


@given(
    arrivals=st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), st.integers(1, 9)), max_size=120),
    tokens=st.integers(9, 60),
)
def test_waiting_tokens_stay_within_their_bound_and_nobody_loses_to_who_has_more(
    arrivals: list[tuple[str, int]], tokens: int
) -> None:
    world = World(requests=1000, tokens=tokens, running=0)
    for tenant, prompt in arrivals:
        before, lost = world.tokens_held(), len(world.lost)
        with suppress(Overloaded):
            world.submit(prompt, tenant)
        for loser in world.lost[lost:]:
            assert before[loser] / WEIGHTS[loser] > (before[tenant] + prompt) / WEIGHTS[tenant]
        assert sum(world.tokens_held().values()) <= tokens


def test_a_tenant_that_fills_the_queue_keeps_no_other_one_out() -> None:
    """Its newest requests make room, down to equal shares; then the other one is refused as well."""
    world = World(requests=8, running=0)
    for _ in range(8):
        world.submit(tenant="a")
    world.refused(tenant="a")
    for _ in range(4):
        world.submit(tenant="b")
    world.refused(tenant="b")
    world.refused(tenant="a")
    assert world.lost == ["a"] * 4
    assert world.held() == {"a": 4, "b": 4}


def test_the_newest_request_of_the_tenant_is_the_one_that_loses_its_place() -> None:
    world = World(requests=2, running=0)
    first, second = world.submit(), world.submit()
    world.submit(tenant="b")
    assert first in world.gate._tickets
    assert second not in world.gate._tickets


def test_a_request_that_is_given_up_before_the_engine_has_it_takes_nobodys_place() -> None:
    world = World(requests=1, running=0)
    world.submit(tenant="d")
    with ExitStack() as attempt:
        world.enter(attempt, "c")
    assert world.lost == []


def test_a_request_that_is_refused_for_its_tokens_takes_nobodys_place() -> None:
    world = World(requests=2, tokens=100, running=0)
    for _ in range(2):
        world.submit(10, tenant="a")
    assert world.refused(101, tenant="b").code == "queued_tokens"
    assert world.lost == []


def test_a_place_that_becomes_free_meanwhile_is_taken_before_anothers() -> None:
    world = World(requests=2, running=0)
    first = world.submit(tenant="a")
    world.submit(tenant="a")
    with ExitStack() as attempt:
        ticket = world.enter(attempt, "b")
        world.gate.started(first)
        world.gate.submit(ticket, 1)
    assert world.lost == []


def test_as_many_claims_are_let_in_as_will_be_met() -> None:
    """Two of four places are more than one has by then; the third claim would be on no more than its own share."""
    world = World(requests=4, running=0)
    for _ in range(4):
        world.submit(tenant="a")
    with ExitStack() as attempt:
        claims = [world.enter(attempt, "b") for _ in range(2)]
        with pytest.raises(Overloaded):
            world.enter(attempt, "b")
        for ticket in claims:
            world.gate.submit(ticket, 1)
        assert world.held() == {"a": 2, "b": 2}


def test_a_claim_on_what_its_owner_no_longer_has_too_much_of_is_refused() -> None:
    world = World(requests=2, running=0)
    world.submit(tenant="a")
    second = world.submit(tenant="a")
    with ExitStack() as attempt:
        ticket = world.enter(attempt, "b")
        world.gate.started(second)
        world.submit(tenant="c")
        with pytest.raises(Overloaded) as refused:
            world.gate.submit(ticket, 1)
    assert refused.value.code == "queue_full"
    assert world.lost == []


def test_a_request_that_has_lost_its_place_goes_no_further() -> None:
    """It hears of it between two steps of its own; until then it must take nothing from others."""
    world = World(requests=1, running=0)
    with ExitStack() as attempt:
        ticket = world.enter(attempt, "d")
        world.submit(tenant="c")
        assert world.lost == ["d"]
        with pytest.raises(Overloaded):
            world.gate.submit(ticket, 1)
    assert world.held() == {"c": 1}


@settings(max_examples=300)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["enter", "submit"] * 3 + ["leave", "start"]),
            st.sampled_from("aaabcd"),
            st.integers(0, 3) | st.integers(4, 30),
        ),
        max_size=120,
    ),
    places=st.integers(1, 6),
    tokens=st.integers(5, 20),
)
def test_nobody_loses_a_place_to_a_request_that_is_refused_or_leaves(
    moves: list[tuple[str, str, int]], places: int, tokens: int
) -> None:
    """However their preparations overlap; and both bounds hold for those that have a place."""
    world, open_ones = World(requests=places, tokens=tokens, running=0), dict[Ticket, ExitStack]()
    for move, tenant, number in moves:
        lost, held = len(world.lost), world.placed()
        try:
            if move == "enter":
                attempt = ExitStack()
                open_ones[world.enter(attempt, tenant)] = attempt
            elif open_ones:
                ticket = list(open_ones)[number % len(open_ones)]
                if move == "submit" and ticket.step is None:
                    attempt = open_ones.pop(ticket)
                    with attempt:
                        world.gate.submit(ticket, number + 1)
                        open_ones[ticket] = attempt.pop_all()
                elif move == "start" and ticket.step is not None:
                    world.gate.started(ticket)
                elif move == "leave":
                    open_ones.pop(ticket).close()
            refused = False
        except Overloaded:
            refused = True
        if refused or move != "submit":
            assert len(world.lost) == lost
        assert set(world.lost[lost:]) <= set(held)
        assert sum(world.placed().values()) <= places
        assert sum(world.tokens_held().values()) <= tokens


def test_a_request_that_has_started_has_no_place_to_lose() -> None:
    world = World(requests=1, running=1)
    world.gate.started(world.submit(tenant="a"))
    world.step(running=1, waiting=1)
    world.refused(tenant="b")
    assert world.lost == []


@given(arrivals=st.lists(st.sampled_from(sorted(WEIGHTS)), max_size=120), places=st.integers(1, 20))
def test_a_full_queue_is_shared_by_weight_whoever_comes_first(arrivals: list[str], places: int) -> None:
    """Who was refused a place, or lost one, would have had more for its weight with it than any other has."""
    world, wanting = World(requests=places, running=0), set()
    for tenant in arrivals:
        try:
            world.submit(tenant=tenant)
        except Overloaded:
            wanting.add(tenant)
    wanting |= set(world.lost)
    held = world.held()
    assert sum(held.values()) == min(places, len(arrivals))
    for tenant in wanting:
        with_one_more = (held[tenant] + 1) / WEIGHTS[tenant]
        assert all(held[other] / WEIGHTS[other] <= with_one_more + 1e-9 for other in held)


def test_a_place_is_looked_for_before_the_body_is_read_and_none_is_taken() -> None:
    world = World(requests=1, running=0)
    tenants = [TenantConfig(name=name, anonymous=True) for name in ("a", "b")]
    world.gate.require_room(tenants[0])
    assert world.gate.waiting == 0
    world.submit(tenant="a")
    with pytest.raises(Overloaded):
        world.gate.require_room(tenants[0])
    with pytest.raises(Overloaded):
        world.gate.require_room(tenants[1])  # it would have as many as the other one, and that one none


def starts_behind_others(world: World, seconds: float) -> None:
    """Forty requests start, one after so many seconds, and one more waits all the time."""
    world.stats = EngineStats(running=1)
    line = [world.submit()]
    for _ in range(40):
        line.append(world.submit())
        world.now += seconds
        world.gate.started(line.pop(0))
    world.open.close()


def test_retry_after_is_the_time_to_work_off_the_queue() -> None:
    world = World(requests=3, running=1)
    starts_behind_others(world, seconds=5.0)
    world.step(running=1, waiting=3)
    assert world.refused().retry_after == 15


def test_retry_after_has_bounds() -> None:
    world = World(requests=2, running=1)
    world.step(running=1, waiting=2)
    assert world.refused().retry_after == 1
    starts_behind_others(world, seconds=1000.0)
    world.step(running=1, waiting=2)
    assert world.refused().retry_after == 60


@pytest.mark.parametrize("leaves", [False, True], ids=["nothing waited", "what waited has left"])
def test_an_hour_in_which_nothing_waits_is_not_the_pace_of_starts(leaves: bool) -> None:
    """Two requests an hour apart, and then a burst: it is told what a start takes behind others, not an hour."""
    world = World(requests=3, running=1)
    starts_behind_others(world, seconds=0.1)
    world.step(running=int(leaves))
    for _ in range(2):
        ticket = world.submit()
        if leaves:
            world.submit()
        world.gate.started(ticket)
        world.open.close()
        world.now += 3600.0
    world.step(running=1, waiting=3)
    assert world.refused().retry_after == 1


def test_the_pace_of_arrivals_that_need_not_wait_is_not_that_of_starts() -> None:
    """There is always another request on its way, and a slot for it."""
    world = World(requests=3, running=4)
    next_one = world.submit()
    for _ in range(5):
        ticket, next_one = next_one, world.submit()
        assert world.gate.waiting == 0
        world.gate.started(ticket)
        world.now += 3600.0
    world.step(running=4, waiting=3)
    assert world.refused().retry_after == 1
