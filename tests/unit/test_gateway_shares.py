"""Who gives way in a full queue: the same requests as a search through all of them, one after the other, would find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from paceline_server.gateway.shares import Claim, Ticket, giving_way


def searched(line: list[Ticket], size: Callable[[Ticket], int], claim: Claim, excess: int) -> list[Ticket] | None:
    """The rule as it reads, at the cost of the whole line for every request that has to go."""
    staying = [one for one in line if size(one)]
    held: Counter[str] = Counter()
    for one in staying:
        held[one.tenant] += size(one)
    claimed = (held[claim.tenant] + claim.amount) / claim.weight
    losers: list[Ticket] = []
    while excess > 0:
        newest = {one.tenant: one for one in staying}.values()
        most = max(newest, key=lambda one: held[one.tenant] / one.weight, default=None)
        if most is None or held[most.tenant] / most.weight <= claimed:
            return None
        staying.remove(most)
        losers.append(most)
        held[most.tenant] -= size(most)
        excess -= size(most)
    return losers


TENANTS = st.sampled_from("abcde")
WEIGHTS = st.sampled_from([0.3, 1.0, 1.0, 2.5])
"""Of each ticket: a tenant's weight may change while some of its requests wait."""


@given(
    line=st.lists(st.tuples(TENANTS, WEIGHTS, st.integers(0, 5)), max_size=30),
    claim=st.builds(Claim, TENANTS, WEIGHTS, st.integers(1, 6)),
    excess=st.integers(0, 20),
)
def test_it_is_the_newest_of_whoever_holds_the_most_by_its_weight_each_time(
    line: list[tuple[str, float, int]], claim: Claim, excess: int
) -> None:
    tickets = [Ticket(tenant, weight, lambda: None, placed=True, prompt_tokens=size) for tenant, weight, size in line]

    def size(one: Ticket) -> int:
        return one.prompt_tokens

    assert giving_way(tickets, size, claim, excess) == searched(tickets, size, claim, excess)


def test_every_request_is_measured_a_few_times_however_many_have_to_go() -> None:
    """A claim of a thousand on a line of two thousand."""
    tickets = [Ticket("a", 1.0, lambda: None, placed=True) for _ in range(2000)]
    measured: Counter[Ticket] = Counter()

    def size(one: Ticket) -> int:
        measured[one] += 1
        return 1

    leaving = giving_way(tickets, size, Claim("b", 1.0, 1000), excess=1000)
    assert leaving == tickets[:999:-1]
    assert max(measured.values()) <= 4
