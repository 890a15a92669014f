"""Tuning: queueing theory foretells what the simulator then shows, and proposes settings that carry the trace."""

import json
import sys
from itertools import pairwise
from math import inf
from random import Random
from xml.etree import ElementTree

import pytest

from paceline_server import cli
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.errors import InvalidConfiguration
from paceline_server.simulator.driver import Pool
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.queueing import Moments, Workload, pollaczek_khinchine, predict
from paceline_server.simulator.trace import TraceRequest, write
from paceline_server.simulator.tune import (
    Candidate,
    candidates,
    check,
    delay_seconds,
    frontier,
    propose,
    typical_stretch,
)

MACHINE = Machine(fixed=8e-3, by_token=30e-6, by_pair=40e-9)
POOL = Pool(4096)


def poisson(rate, count=400, seed=1, **options):
    random, now, trace = Random(seed), 0.0, []
    for _ in range(count):
        now += random.expovariate(rate)
        sizes = {"prompt_tokens": random.randrange(20, 500), "output_tokens": random.randrange(20, 120)}
        trace.append(TraceRequest(arrival=now, **sizes, **options))
    return trace


def test_waiting_in_a_queue_with_one_server_is_as_pollaczek_and_khinchine_say():
    exponential, constant = Moments(0.5, 0.5), Moments(0.5, 0.25)
    assert pollaczek_khinchine(1.0, exponential) == pytest.approx(0.5), "rho/(mu-lambda) of M/M/1"
    assert pollaczek_khinchine(1.0, constant) == pytest.approx(0.25), "half of it where all are alike"
    assert pollaczek_khinchine(2.0, constant) == inf


@pytest.mark.parametrize("rate", [5.0, 20.0])
@pytest.mark.parametrize("limits", [SchedulerLimits(32, 128), SchedulerLimits(64, 512)])
def test_the_prediction_is_near_what_the_simulator_shows(rate, limits):
    trace = poisson(rate)
    prediction = predict(Workload.of(trace), MACHINE, limits, POOL)
    shown = check(Candidate(limits, prediction), trace, MACHINE, POOL)
    assert prediction.ttft == pytest.approx(shown.ttft, rel=0.35)
    assert prediction.capacity == pytest.approx(shown.capacity, rel=0.15)


@pytest.mark.parametrize(("output", "count"), [(1, 500), (50, 200), (4000, 100)])
def test_a_check_is_bounded_by_output_however_long_the_trace_and_its_answers_are(output, count):
    trace = [TraceRequest(arrival=index, prompt_tokens=9, output_tokens=output) for index in range(2000)]
    assert len(typical_stretch(trace)) == count
    assert typical_stretch(trace[:50]) == trace[:50]


def test_what_is_checked_comes_at_the_rate_of_the_whole_trace():
    slow, fast = range(0, 1500, 3), (1500 + index / 4 for index in range(2000))
    trace = [TraceRequest(arrival=now, prompt_tokens=9, output_tokens=100) for now in (*slow, *fast)]
    stretch = typical_stretch(trace)
    assert Workload.of(stretch).rate == pytest.approx(Workload.of(trace).rate, rel=0.05)


def test_a_load_beyond_capacity_waits_without_end():
    work = Workload.of(poisson(200.0))
    prediction = predict(work, MACHINE, SchedulerLimits(8, 64), POOL)
    assert prediction.ttft == inf
    assert prediction.capacity < work.rate * work.output.mean


def test_a_small_kv_cache_bounds_capacity_as_a_small_batch_does():
    work = Workload.of(poisson(5.0))
    small, large = (predict(work, MACHINE, SchedulerLimits(64, 512), Pool(blocks)) for blocks in (64, 4096))
    assert small.capacity < large.capacity


def test_a_prefix_that_an_earlier_request_has_computed_is_no_work():
    plain = Workload.of(poisson(5.0))
    shared = Workload.of(poisson(5.0, prefix="p", prefix_tokens=20))
    blocks = Workload.of(poisson(5.0, blocks=("a",), block_tokens=20))
    assert shared == blocks
    assert plain.prompt.mean - shared.prompt.mean == pytest.approx(20, abs=0.5)


def test_of_the_frontier_nothing_is_beaten_and_longer_steps_buy_something():
    found = candidates(Workload.of(poisson(20.0)), MACHINE, POOL)
    best = frontier(found)
    assert 2 <= len(best) < len(found) / 3
    for shorter, longer in pairwise(best):
        assert shorter.prediction.longest_step <= longer.prediction.longest_step
        sooner = longer.prediction.ttft < shorter.prediction.ttft
        assert sooner or longer.prediction.capacity > shorter.prediction.capacity


def test_the_proposal_keeps_steps_short_and_a_reserve_of_capacity():
    work = Workload.of(poisson(20.0))
    found = candidates(work, MACHINE, POOL)
    proposed = propose(frontier(found), found, work, longest_step=0.030).prediction
    assert proposed.longest_step <= 0.030
    assert proposed.capacity >= 1.25 * work.rate * work.output.mean


def test_where_nothing_carries_the_load_the_most_capacity_with_short_steps_is_proposed():
    work = Workload.of(poisson(500.0))
    found = candidates(work, MACHINE, POOL)
    proposed = propose(frontier(found), found, work, longest_step=0.030)
    assert proposed.prediction.capacity == max(
        one.prediction.capacity for one in found if one.prediction.longest_step <= 0.030
    )
    shortest = propose(frontier(found), found, work, longest_step=0.0)
    assert shortest.prediction.longest_step == min(one.prediction.longest_step for one in found)


def test_an_idle_engine_waits_for_company_only_where_some_is_expected():
    assert delay_seconds(Workload.of(poisson(50.0)), MACHINE) == 0.0
    assert delay_seconds(Workload.of(poisson(500.0)), MACHINE) == MACHINE.fixed


def test_requests_that_all_come_at_once_have_no_rate():
    trace = [TraceRequest(arrival=1.0, prompt_tokens=5, output_tokens=5)] * 2
    with pytest.raises(InvalidConfiguration, match="at one time"):
        Workload.of(trace)


def test_the_command_prints_a_frontier_and_settings_and_draws_them(tmp_path, capsys):
    path, plot = tmp_path / "trace.jsonl", tmp_path / "plot.svg"
    write(path, poisson(5.0, 60))
    assert cli.main(["tune", str(path), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "| max_batch_size | max_tokens_in_batch |" in shown
    assert "batching:\n  max_batch_size: " in shown
    assert len(ElementTree.parse(plot).findall(".//{http://www.w3.org/2000/svg}circle")) > 10
    assert cli.main(["tune", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {"workload", "frontier", "proposed"}
    assert figures["proposed"]["max_queue_delay_us"] == 0


def test_a_short_trace_is_named_as_one_and_gives_no_capacity_of_batches_that_it_cannot_fill(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    write(path, poisson(5.0, 3))
    assert cli.main(["tune", str(path)]) == 0
    shown = capsys.readouterr()
    assert f"{path} has 3 requests" in shown.err
    assert "| too few requests |" in shown.out
    write(path, poisson(5.0, 100))
    assert cli.main(["tune", str(path)]) == 0
    shown = capsys.readouterr()
    assert "has 100 requests" not in shown.err


def test_on_a_terminal_the_command_shows_which_settings_it_is_at_and_takes_that_away(tmp_path, capsys, monkeypatch):
    path = tmp_path / "trace.jsonl"
    write(path, poisson(5.0, 20))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["tune", str(path)]) == 0
    shown = capsys.readouterr()
    assert "simulating 1 of " in shown.err
    assert shown.err.endswith("\r\x1b[K")
    assert "simulating" not in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--step-ms", "0"], "--step-ms"), (["--plot", "/nowhere/plot.svg"], "cannot write")]
)
def test_what_cannot_be_tuned_is_refused_by_name(tmp_path, capsys, arguments, message):
    path = tmp_path / "trace.jsonl"
    write(path, poisson(5.0, 10))
    assert cli.main(["tune", str(path), *arguments]) == InvalidConfiguration.exit_code
    assert message in capsys.readouterr().err
