"""The line `slo` takes what its rules say, beside the same rules over a plain list."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from waiting_lines import PROMOTE_AFTER, TARGETS, line_of, sequence

from paceline_server.engine.fairness import CREDIT, QUANTUM
from paceline_server.engine.interface import Tier
from paceline_server.engine.sequence import Sequence


class NaiveSlo:
    """The rules of `slo` over a plain list, looked through from end to end."""

    def __init__(self):
        self.waiting: list[Sequence] = []
        self.used: dict[str, float] = {}
        self.floor = 0.0
        self.since_late: dict[tuple[str, int], int] = {}
        self.overdue_had_last: dict[str, bool] = {}
        self.now = 0.0

    def rank(self, one):
        return list(Tier).index(one.request.tier)

    def of(self, tenant):
        return [one for one in self.waiting if one.request.tenant == tenant and not one.preemptions]

    def deadline(self, one):
        return one.arrival + min(TARGETS[one.request.tier], one.request.timeout or 1e9)

    def late(self, one):
        return self.deadline(one) < self.now

    def overdue(self, one):
        return self.deadline(one) + self.rank(one) * PROMOTE_AFTER

    def next_tenant(self):
        def turn(tenant):
            best = min(map(self.rank, self.of(tenant)))
            in_time = [self.deadline(o) for o in self.of(tenant) if self.rank(o) == best and not self.late(o)]
            level = int(self.used.get(tenant, 0.0) / QUANTUM)
            return (level - (32, 16, 0)[best], min(in_time, default=inf), tenant)

        return min({one.request.tenant for one in self.waiting if not one.preemptions}, key=turn, default=None)

    def forget(self, tenant):
        self.since_late = {key: count for key, count in self.since_late.items() if key[0] != tenant}
        self.overdue_had_last.pop(tenant, None)

    def push(self, one, now):
        self.now = now
        tenant = one.request.tenant
        if not self.of(tenant):
            first = self.next_tenant()
            floor = self.floor if first is None else self.used.get(first, 0.0)
            self.used[tenant] = max(self.used.get(tenant, 0.0), floor - CREDIT)
            self.forget(tenant)
        self.put_back(one, now)

    def put_back(self, one, now):
        self.now = now
        if not self.of(one.request.tenant):
            self.forget(one.request.tenant)
        self.waiting.append(one)

    def take(self, now):
        self.now = now
        resumed = [one for one in self.waiting if one.preemptions]
        tenant = self.next_tenant()
        if resumed or tenant is None:
            one = min(resumed, key=lambda one: one.number, default=None)
        else:
            self.floor = max(self.floor, self.used.get(tenant, 0.0))
            one = self.choose(tenant)
        if one is not None:
            self.waiting.remove(one)
        return one

    def choose(self, tenant):
        best = min(map(self.rank, self.of(tenant)))
        tier = [one for one in self.of(tenant) if self.rank(one) == best]
        late, in_time = [one for one in tier if self.late(one)], [one for one in tier if not self.late(one)]
        overdue = [one for one in self.of(tenant) if self.rank(one) > 0 and self.overdue(one) < self.now]
        since = self.since_late.get((tenant, best), 0)
        turn_of_late = bool(late or overdue) and (not in_time or since >= 3)
        self.since_late[tenant, best] = 0 if turn_of_late else since + 1
        if not turn_of_late:
            return min(in_time, key=lambda one: (self.deadline(one), one.number))
        turn_of_overdue = bool(overdue) and (not late or not self.overdue_had_last.get(tenant, False))
        self.overdue_had_last[tenant] = turn_of_overdue
        if turn_of_overdue:
            return min(overdue, key=lambda one: (self.overdue(one), one.number))
        return min(late, key=lambda one: (self.deadline(one), one.number))

    def remove(self, name):
        found = next((one for one in self.waiting if one.request_id == name), None)
        if found is not None:
            self.waiting.remove(found)
        return found


moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.sampled_from(list(Tier)),
            st.sampled_from("xyz"),
            st.sampled_from([None, 0.05, 3.0]),
        ),
        st.tuples(st.just("take"), st.sampled_from([0, 60, 700]), st.booleans(), st.booleans()),
        st.tuples(st.just("remove"), st.integers(1, 30), st.none(), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, 6.0]), st.none(), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=400)
@given(moves)
def test_slo_takes_what_its_rules_say_whatever_has_happened_before(moves):
    line, naive, now, count = line_of("slo"), NaiveSlo(), 0.0, 0
    for move, first, second, third in moves:
        if move == "push":
            count += 1
            one = sequence(str(count), now, tier=first, tenant=second, timeout=third)
            line.push(one, now)
            naive.push(one, now)
        elif move == "take":
            one = line.take(now)
            assert one is naive.take(now)
            if one is not None:
                line.charge(one, float(first))
                naive.used[one.request.tenant] = naive.used.get(one.request.tenant, 0.0) + first
                if second:
                    one.preemptions += third
                    line.put_back(one, now)
                    naive.put_back(one, now)
        elif move == "remove":
            assert line.remove(str(first)) is naive.remove(str(first))
        else:
            now += first
        assert {one.request_id for one in line} == {one.request_id for one in naive.waiting}
        assert line.num_tokens == sum(one.num_tokens for one in naive.waiting)
