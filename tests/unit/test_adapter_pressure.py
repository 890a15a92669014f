"""What the HPA is told about a service, from what its pods reported."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_operator.adapter.histogram import Histogram, merge
from paceline_operator.adapter.pressure import PodReport, ServiceLoad
from paceline_operator.adapter.scrape import Sample

BOUNDS = (0.1, 0.5, 1.0, 2.0, 4.0, math.inf)
NOTHING = Histogram(BOUNDS, (0.0,) * len(BOUNDS))


def observed(*seconds: float, start: Histogram = NOTHING) -> Histogram:
    counts = list(start.counts)
    for value in seconds:
        counts[next(i for i, bound in enumerate(BOUNDS) if value <= bound)] += 1
    return Histogram(BOUNDS, tuple(counts))


def answered(at: float, *, waiting: float = 0, running: float = 0, ttft: Histogram = NOTHING) -> PodReport:
    return PodReport(Sample(at, waiting, running, ttft), ready=True, loading=False)


MISSING = PodReport(None, ready=True, loading=False)
LOADING = PodReport(None, ready=False, loading=True)
BROKEN = PodReport(None, ready=False, loading=False)


def load_after(*rounds: Mapping[str, PodReport]) -> ServiceLoad:
    load = ServiceLoad(window_seconds=60)
    for reports in rounds:
        load.update(reports)
    return load


def test_queue_depth_adds_waiting_and_running_over_all_pods() -> None:
    load = load_after({"a": answered(0, waiting=3, running=4), "b": answered(0, waiting=1, running=2)})
    assert load.read(0, 2.0).queue_depth == 10


def test_a_missing_pod_counts_with_what_it_last_said_and_never_as_zero() -> None:
    load = load_after({"a": answered(0, running=8), "b": answered(0, running=2)}, {"a": MISSING, "b": answered(5)})
    pressure = load.read(5, 2.0)
    assert pressure.queue_depth == 8
    assert pressure.missing == 1


def test_a_missing_pod_that_never_answered_counts_as_much_as_the_others() -> None:
    load = load_after({"a": answered(0, running=6), "b": answered(0, running=2), "c": MISSING})
    assert load.read(0, 2.0).queue_depth == 12


def test_when_no_pod_answers_any_more_the_last_numbers_stand() -> None:
    load = load_after({"a": answered(0, running=8)}, {"a": MISSING})
    pressure = load.read(300, 2.0)
    assert (pressure.queue_depth, pressure.ttft_pressure, pressure.measured_at) == (8, 1.0, 0)


@pytest.mark.parametrize("silent", [LOADING, BROKEN])
def test_a_silent_pod_that_is_not_ready_holds_no_requests(silent: PodReport) -> None:
    pressure = load_after({"a": answered(0, running=6), "b": silent}).read(0, 2.0)
    assert (pressure.queue_depth, pressure.missing) == (6, 0)


def test_an_idle_service_has_no_pressure_and_no_p95() -> None:
    pressure = load_after({"a": answered(0)}, {"a": answered(5)}).read(5, 2.0)
    assert (pressure.queue_depth, pressure.ttft_p95, pressure.ttft_pressure) == (0, None, 0.0)


def test_a_service_without_pods_has_numbers_too_and_holds_its_replicas() -> None:
    """Its pods were evicted, or a quota refuses them. One that is scaled to zero has no HPA that asks."""
    pressure = ServiceLoad().read(0, 2.0)
    assert (pressure.queue_depth, pressure.ttft_pressure, pressure.measured_at) == (0, 1.0, None)


def test_pressure_is_the_p95_of_the_window_over_the_objective() -> None:
    load = load_after({"a": answered(0)}, {"a": answered(5, ttft=observed(*[0.3] * 90, *[1.5] * 10))})
    pressure = load.read(5, 2.0)
    assert pressure.ttft_p95 == pytest.approx(1.5)  # the middle of the bucket (1, 2]
    assert pressure.ttft_pressure == pytest.approx(0.75)


def test_pressure_is_clamped_to_two() -> None:
    load = load_after({"a": answered(0)}, {"a": answered(5, ttft=observed(3.9, 3.9))})
    assert load.read(5, 0.1).ttft_pressure == 2.0


def test_pods_are_weighted_by_their_requests() -> None:
    load = load_after(
        {"a": answered(0), "b": answered(0)},
        {"a": answered(5, ttft=observed(*[0.05] * 99)), "b": answered(5, ttft=observed(3.0))},
    )
    p95 = load.read(5, 2.0).ttft_p95
    assert p95 is not None
    assert p95 <= 0.1


def test_observations_from_before_the_first_scrape_do_not_count() -> None:
    old = observed(3.0, 3.0, 3.0)
    load = load_after({"a": answered(0, ttft=old)}, {"a": answered(5, ttft=observed(0.05, start=old))})
    p95 = load.read(5, 2.0).ttft_p95
    assert p95 is not None
    assert p95 <= 0.1


def test_observations_leave_the_window_after_its_length() -> None:
    load = load_after({"a": answered(0)}, {"a": answered(5, ttft=observed(3.0))})
    assert load.read(65, 2.0).ttft_p95 is not None
    assert load.read(65.1, 2.0).ttft_p95 is None


def test_a_restarted_server_counts_from_zero_again() -> None:
    before, after = observed(*[3.0] * 10), observed(0.05, 0.05)
    load = load_after({"a": answered(0, ttft=before)}, {"a": answered(5, ttft=after)})
    p95 = load.read(5, 2.0).ttft_p95
    assert p95 is not None
    assert 0 < p95 <= 0.1


def test_a_pod_that_is_gone_takes_its_numbers_with_it() -> None:
    load = load_after({"a": answered(0)}, {"a": answered(5, running=3, ttft=observed(3.0))}, {"b": answered(10)})
    pressure = load.read(10, 2.0)
    assert (pressure.queue_depth, pressure.ttft_p95) == (0, None)


def test_pressure_is_held_at_one_while_a_replica_is_loading() -> None:
    slow = {"a": answered(5, ttft=observed(3.9)), "b": LOADING}
    quiet = {"a": answered(10), "b": LOADING}
    assert load_after({"a": answered(0)}, slow).read(5, 0.5).ttft_pressure == 1.0
    assert load_after(quiet).read(10, 0.5).ttft_pressure == 1.0


def test_an_outage_is_no_idleness_and_holds_the_replicas() -> None:
    """Every pod backs off, nobody's requests arrive: the pods that were needed will be needed again."""
    load = load_after({"a": answered(0, running=9), "b": answered(0)}, {"a": BROKEN, "b": BROKEN})
    pressure = load.read(5, 2.0)
    assert (pressure.ttft_pressure, pressure.queue_depth) == (1.0, 0)


def test_one_broken_pod_of_an_idle_service_holds_nothing() -> None:
    assert load_after({"a": answered(0), "b": BROKEN}).read(0, 2.0).ttft_pressure == 0.0


def test_a_missing_pod_keeps_pressure_from_falling_below_one_but_not_from_rising() -> None:
    load = load_after({"a": answered(0)}, {"a": answered(5, ttft=observed(0.05)), "b": MISSING})
    assert load.read(5, 2.0).ttft_pressure == 1.0
    load = load_after({"a": answered(0)}, {"a": answered(5, ttft=observed(3.9)), "b": MISSING})
    assert load.read(5, 2.0).ttft_pressure > 1.5


def test_requests_that_wait_without_any_first_token_are_not_idleness() -> None:
    assert load_after({"a": answered(0, waiting=5)}).read(0, 2.0).ttft_pressure == 1.0


def test_a_sample_read_twice_counts_once() -> None:
    sample = answered(5, ttft=observed(0.3))
    load = load_after({"a": answered(0)}, {"a": sample}, {"a": sample})
    assert load.read(5, 2.0).ttft_p95 == pytest.approx(0.1 + 0.4 * 0.95)


def test_pods_of_two_releases_with_other_buckets_are_added_up() -> None:
    total = merge([Histogram((1.0, math.inf), (3.0, 1.0)), Histogram((0.5, 1.0, math.inf), (2.0, 0.0, 0.0))])
    assert total == Histogram((0.5, 1.0, math.inf), (2.0, 3.0, 1.0))


def test_a_quantile_beyond_the_last_bound_is_the_last_bound() -> None:
    assert observed(100.0).quantile(0.95) == 4.0


@given(st.lists(st.floats(0.001, 3.999), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], q: float) -> None:
    exact = sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]
    upper = next(bound for bound in BOUNDS if exact <= bound)
    lower = max((bound for bound in BOUNDS if bound < exact), default=0.0)
    estimate = observed(*values).quantile(q)
    assert estimate is not None
    assert lower - 1e-9 <= estimate <= upper + 1e-9


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40))
def test_the_window_counts_every_observation_once_whatever_restarts(rounds: list[tuple[int, bool]]) -> None:
    """Each round the server hands out some first tokens; sometimes it has restarted just before."""
    load, total, running = ServiceLoad(window_seconds=1e9), 0, NOTHING
    load.update({"a": answered(0)})
    for at, (tokens, restarts) in enumerate(rounds, start=1):
        if restarts and tokens < running.total:  # a restart that the counts can show
            running = NOTHING
        running = observed(*[0.3] * tokens, start=running)
        total += tokens
        load.update({"a": answered(at, ttft=running)})
    increases = load._histories["a"].increases
    assert sum(increase.total for _, increase in increases) == total


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from([LOADING, BROKEN, MISSING, None]))),
    st.floats(0.001, 600),
)
def test_whatever_pods_say_the_numbers_are_finite_and_in_range(
    pods: list[tuple[float, float, PodReport | None]], objective: float
) -> None:
    load = ServiceLoad()
    for at in (0.0, 5.0):
        load.update({str(i): silent or answered(at, waiting=w, running=r) for i, (w, r, silent) in enumerate(pods)})
    pressure = load.read(5.0, objective)
    assert 0 <= pressure.queue_depth < math.inf
    assert 0 <= pressure.ttft_pressure <= 2
