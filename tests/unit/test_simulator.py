"""The simulator: the engine's core on a pretended machine."""

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server import cli
from paceline_server.config import SchedulingConfig
from paceline_server.engine.interface import FinishReason, Tier
from paceline_server.engine.policies import ttft_targets
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.errors import InvalidConfiguration
from paceline_server.simulator.driver import Pool, Simulation
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.report import quantile, rows, table
from paceline_server.simulator.trace import TraceRequest, read, write

MACHINE = Machine(fixed=0.010, by_token=0.001, by_pair=0.0)
LIMITS = SchedulerLimits(8, 64)
POOL = Pool(256)
TARGETS = ttft_targets(SchedulingConfig().tiers)


def simulation(trace, machine=MACHINE, pool=POOL, limits=LIMITS, seed=0, **scheduling):
    return Simulation(trace, machine, pool, limits, SchedulingConfig(**{"admission": "none", **scheduling}), seed)


def asked(arrival=0.0, prompt=20, output=5, **options):
    return TraceRequest(arrival=arrival, prompt_tokens=prompt, output_tokens=output, **options)


def test_a_request_alone_takes_the_time_of_its_steps():
    [outcome] = simulation([asked(3.0, prompt=100, output=4)]).run()
    assert outcome.ttft == pytest.approx((0.010 + 0.064) + (0.010 + 0.036))
    assert outcome.tpot == pytest.approx(0.010 + 0.001)
    assert (outcome.tokens, outcome.finish) == (4, FinishReason.STOP)


def test_attention_is_paid_by_pairs_of_tokens():
    machine = Machine(fixed=0.0, by_token=0.0, by_pair=0.001)
    [outcome] = simulation([asked(prompt=10, output=2)], machine).run()
    assert outcome.ttft == pytest.approx(0.055)
    assert outcome.end - outcome.ttft == pytest.approx(0.011)


def test_an_answer_ends_at_its_length_or_is_cut_at_max_tokens():
    long, cut = simulation([asked(output=7, max_tokens=100), asked(output=7, max_tokens=3)]).run()
    assert (long.tokens, long.finish) == (7, FinishReason.STOP)
    assert (cut.tokens, cut.finish) == (3, FinishReason.LENGTH)


def test_a_request_that_comes_in_the_middle_of_a_step_has_waited_since_it_came():
    first, second = simulation([asked(0.0, prompt=50), asked(0.01)]).run()
    assert first.ttft == pytest.approx(0.060)
    assert second.ttft == pytest.approx(0.050 + 0.010 + 0.021)


def test_a_shared_prefix_is_computed_once():
    trace = [asked(0.0, prompt=100, prefix="p", prefix_tokens=96), asked(9.0, prompt=100, prefix="p", prefix_tokens=96)]
    first, second = simulation(trace).run()
    assert second.ttft == pytest.approx(0.010 + 0.004)
    assert first.ttft > 0.1


@pytest.mark.parametrize("policy", ["slo", "sjf"])
def test_a_pool_that_the_trace_cannot_fill_costs_no_more_than_one_that_it_just_fills(policy):
    trace = [asked(index / 50, prompt=40, prefix="p", prefix_tokens=32, max_tokens=30) for index in range(40)]
    runs = [simulation(trace, pool=Pool(blocks), policy=policy) for blocks in (40 * 6, 10**15)]
    assert len({run.core.scheduler.blocks.num_blocks for run in runs}) == 1
    just, beyond = ([(one.ttft, one.end) for one in run.run()] for run in runs)
    assert just == beyond


def test_the_same_seed_gives_the_same_run_and_another_one_does_not():
    machine = replace(MACHINE, jitter=0.1)
    trace = [asked(index / 10, prompt=10 + index) for index in range(20)]
    runs = [[outcome.end for outcome in simulation(trace, machine, seed=seed).run()] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_fork_goes_its_own_way_and_leaves_the_original_alone():
    trace = [asked(index / 50, prompt=30) for index in range(40)]
    straight = [outcome.end for outcome in simulation(trace).run()]
    original = simulation(trace)
    for _ in range(10):
        original.advance()
    fork = original.fork()
    assert [outcome.end for outcome in fork.run()] == straight
    assert not original.done
    assert [outcome.end for outcome in original.run()] == straight


requests = st.builds(
    asked,
    st.floats(0, 3),
    prompt=st.integers(1, 120),
    output=st.integers(1, 30),
    tier=st.sampled_from(list(Tier)),
    priority=st.integers(-2, 2),
    tenant=st.sampled_from("abc"),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    timeout=st.sampled_from([None, 0.5, 5.0]),
)


@settings(max_examples=60)
@given(
    trace=st.lists(requests, min_size=1, max_size=25).map(lambda some: sorted(some, key=lambda one: one.arrival)),
    policy=st.sampled_from(["slo", "fcfs", "priority", "sjf"]),
    admission=st.sampled_from(["none", "timeout", "target"]),
    blocks=st.integers(10, 40),
)
def test_every_request_is_refused_or_ends_once_and_the_books_agree_after_every_step(trace, policy, admission, blocks):
    run = simulation(trace, pool=Pool(blocks), policy=policy, admission=admission)
    for _ in range(20_000):
        if run.done:
            break
        run.advance()
        run.core.scheduler.check_integrity()
    assert run.done, "no progress"
    for outcome in run.outcomes:
        assert (outcome.refusal is None) == (outcome.finish is not None)
        if outcome.finish is FinishReason.STOP:
            assert outcome.tokens == outcome.request.output_tokens
        if outcome.finish is FinishReason.TIMEOUT:
            assert outcome.end >= outcome.request.timeout
    assert run.core.stats().kv_usage == 0.0


def test_the_figures_are_counted_by_tier_and_over_all():
    trace = [asked(0.0, tier=Tier.INTERACTIVE), asked(0.0, tier=Tier.BATCH), asked(0.0, prompt=200, timeout=0.1)]
    found = {row.tier: row for row in rows(simulation(trace).run(), TARGETS)}
    assert set(found) == {"interactive", "standard", "batch", "all"}
    assert found["standard"].timed_out == 1.0
    assert found["interactive"].met == found["batch"].met == 1.0
    assert found["all"].requests == 3
    assert found["all"].met == pytest.approx(2 / 3)
    assert table(list(found.values()), "slo").count("\n") == 5


def test_a_quantile_is_the_smallest_value_that_the_share_does_not_exceed():
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert quantile([5.0], 0.99) == quantile([5.0], 0.01) == 5.0


def test_a_trace_survives_its_file_and_is_put_in_order(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = [asked(1.0, tier=Tier.BATCH, timeout=3.0), asked(0.5, prefix="x", prefix_tokens=4, max_tokens=9)]
    write(path, trace)
    assert read(path) == trace[::-1]


def test_a_line_ends_at_its_newline_and_nowhere_else(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": "a\u2028b\x85c"}\r\n')
    assert [one.tenant for one in read(path)] == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 2: arrival: is required; prompt_tokens: is required"),
        ('{"arrival": 0, "prompt_tokens": 0, "output_tokens": 1}', "line 2: prompt_tokens"),
        (
            '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "tear": 1}',
            "line 2: tear: is not a known field",
        ),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_tokens": 2, "prefix": "p"}', "prefix_tokens"),
        ("nonsense", "line 2"),
        *(
            (f'{{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "{key}": {value}}}', f"line 2: {key}")
            for key in ("arrival", "weight", "timeout", "priority")
            for value in ("Infinity", "-Infinity", "NaN", "1e999", "-1e999")
        ),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "priority": 1' + "0" * 400 + "}", "line 2: priority"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}}\n{line}\n')
    with pytest.raises(InvalidConfiguration, match=message):
        read(path)


def test_the_command_prints_a_table_for_every_policy(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    random = Random(1)
    write(path, [asked(random.random() * 5, prompt=random.randrange(5, 300)) for _ in range(50)])
    assert cli.main(["simulate", str(path), "--policy", "slo", "--policy", "sjf", "--admission", "target"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("| slo | requests |")
    assert "\n| sjf | requests |" in shown
    assert cli.main(["simulate", str(path), "--json"]) == 0
    [*_, whole] = json.loads(capsys.readouterr().out)["slo"]
    assert (whole["tier"], whole["requests"], whole["refused"]) == ("all", 50, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens-in-batch", "8"], "at least --max-batch-size"),
        (["--kv-blocks", "1"], "more --kv-blocks"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(tmp_path, capsys, arguments, message):
    path = tmp_path / "trace.jsonl"
    write(path, [asked(prompt=100)])
    assert cli.main(["simulate", str(path), *arguments]) == InvalidConfiguration.exit_code
    assert message in capsys.readouterr().err


def test_a_trace_that_is_not_there_or_is_empty_is_named(tmp_path, capsys):
    assert cli.main(["simulate", str(tmp_path / "nowhere")]) == InvalidConfiguration.exit_code
    (tmp_path / "empty").write_text("\n")
    assert cli.main(["simulate", str(tmp_path / "empty")]) == InvalidConfiguration.exit_code
    shown = capsys.readouterr().err
    assert "cannot read" in shown
    assert "holds no requests" in shown


@pytest.mark.parametrize("flag", ["--step-ms=-1", "--jitter=nan", "--kv-blocks=0"])
def test_a_number_that_makes_no_machine_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        cli.main(["simulate", "trace", flag])
    assert "must be" in capsys.readouterr().err
