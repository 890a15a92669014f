"""Shadow mode: what a running engine writes down, and that the simulator reads it."""

import json
import logging

import pytest

from paceline_server.config import SchedulingConfig
from paceline_server.engine import recorder as module
from paceline_server.engine.interface import FinishReason, GenerationRequest, Tier, TokenOutput
from paceline_server.engine.recorder import TraceRecorder
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.errors import InvalidConfiguration
from paceline_server.simulator.driver import Pool, Simulation
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.trace import read

PREFIX = tuple(range(100, 148))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


def recorder_of(path, max_bytes=1_000_000):
    return TraceRecorder(path, max_bytes, block_tokens=16, clock=lambda: 1_700_000_000.0)


def asked(name="a", prompt=(*PREFIX, 7), **options):
    return GenerationRequest(name, prompt, 50, **options)


def serve(recorder, request, tokens=3, index=0):
    recorder.submitted(request)
    for _ in range(tokens - 1):
        recorder.saw([TokenOutput(request.request_id, (5,), index=index)])
    recorder.saw([TokenOutput(request.request_id, (5,), FinishReason.STOP, index=index)])


def test_an_answer_leaves_one_line_of_sizes_times_and_whose_it_was(path):
    recorder = recorder_of(path)
    serve(recorder, asked(tier=Tier.BATCH, tenant="team-a", weight=2.0, priority=3, timeout=9.0))
    recorder.close()
    [line] = read(path)
    assert (line.prompt_tokens, line.output_tokens, line.max_tokens) == (49, 3, 50)
    assert (line.tier, line.tenant, line.weight, line.priority, line.timeout) == (Tier.BATCH, "team-a", 2.0, 3, 9.0)
    assert line.arrival == 1_700_000_000.0


def test_the_trace_holds_no_token_of_a_prompt_and_no_digest_that_a_guess_could_be_tested_against(path):
    for _ in range(2):
        recorder = recorder_of(path)
        serve(recorder, asked())
        recorder.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert set(first) <= {"arrival", "prompt_tokens", "output_tokens", "max_tokens", "tier", "priority", "tenant",
                          "weight", "blocks", "block_tokens"}  # fmt: skip
    assert len(first["blocks"]) == 3
    assert not set(first["blocks"]) & set(second["blocks"]), "another process has another key"


def test_requests_that_begin_alike_do_so_in_the_simulator_and_other_salts_hold_them_apart(path):
    recorder = recorder_of(path)
    serve(recorder, asked("a", (*PREFIX, 1)))
    serve(recorder, asked("b", (*PREFIX[:32], *range(30))))
    serve(recorder, asked("c", (*PREFIX, 1), cache_salt="other"))
    recorder.close()
    trace = read(path)
    limits, machine = SchedulerLimits(4, 256), Machine(1e-3, 1e-4, 0.0)
    run = Simulation(trace, machine, Pool(64), limits, SchedulingConfig(admission="none"))
    run.run()
    assert run.core.stats().prefix_hit_tokens == 32


def test_each_of_several_answers_has_a_line_and_one_that_is_given_up_is_as_long_as_it_was(path):
    recorder = recorder_of(path)
    recorder.submitted(asked("a", n=3))
    recorder.saw([TokenOutput("a", (5,), index=0), TokenOutput("a", (5,), index=1)])
    recorder.saw([TokenOutput("a", (5,), FinishReason.LENGTH, index=0)])
    recorder.aborted("a", 1)
    recorder.aborted("a")
    recorder.aborted("a")
    recorder.saw([TokenOutput("unknown", (5,))])
    recorder.close()
    assert sorted(line.output_tokens for line in read(path)) == [1, 1, 2]


def test_a_file_that_is_full_is_kept_once_and_a_new_one_begun(path):
    recorder = recorder_of(path, max_bytes=1)
    for name in "abc":
        serve(recorder, asked(name))
        while recorder._ended.qsize():
            pass
    recorder.close()
    assert {one.name for one in path.parent.iterdir()} == {"trace.jsonl", "trace.jsonl.1"}
    assert path.read_text() == ""


def test_a_disk_that_is_too_slow_costs_lines_and_never_time(path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_MAX_PENDING", 2)
    monkeypatch.setattr(TraceRecorder, "_run", lambda self: None)
    recorder = recorder_of(path)
    with caplog.at_level(logging.WARNING):
        for name in "abcdef":
            serve(recorder, asked(name))
    assert [record.args[0] for record in caplog.records] == [1, 2, 4]


def test_a_disk_that_is_full_ends_the_trace_and_not_the_engine(path, monkeypatch, caplog):
    recorder = recorder_of(path)

    def fail(lines):
        raise OSError("no space left")

    monkeypatch.setattr(recorder, "_write", fail)
    serve(recorder, asked())
    recorder._thread.join(10)
    serve(recorder, asked("b"))
    assert "no space left" in caplog.text


def test_a_disk_that_is_full_leaves_a_trace_that_can_be_read(path, monkeypatch):
    recorder = recorder_of(path)
    serve(recorder, asked())
    recorder.close()
    recorder = recorder_of(path)

    def write_half(lines):
        with path.open("a") as file:
            file.write(lines[0][:20])
        raise OSError("no space left")

    monkeypatch.setattr(recorder, "_write", write_half)
    serve(recorder, asked("b"))
    recorder._thread.join(10)
    assert len(read(path)) == 1


@pytest.mark.parametrize("lines", [0, 1, 100])
def test_half_a_line_that_a_killed_server_has_left_is_not_gone_on_with(path, lines):
    recorder = recorder_of(path)
    for number in range(lines):
        serve(recorder, asked(str(number), prompt=range(2048)))
    recorder.close()
    with path.open("a") as file:
        file.write('{"arrival": 17')
    recorder = recorder_of(path)
    serve(recorder, asked("last"))
    recorder.close()
    assert len(read(path)) == lines + 1


def test_what_is_no_trace_is_not_cut(path):
    path.write_text("notes")
    recorder_of(path).close()
    assert path.read_text() == "notes"


def test_a_path_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(InvalidConfiguration, match=r"observability\.trace_path"):
        recorder_of(tmp_path / "nowhere" / "trace")


def test_a_second_server_leaves_the_file_to_the_first_and_writes_its_own_beside_it(path, caplog):
    first, second = recorder_of(path, max_bytes=300), recorder_of(path, max_bytes=300)
    for _ in range(4):  # each file is renamed on the way
        serve(first, asked(), tokens=2)
        serve(second, asked(), tokens=5)
    first.close()
    second.close()
    (other,) = path.parent.glob("trace-*.jsonl")
    for file, expected in ((path, 2), (other, 5)):
        lines = file.with_name(f"{file.name}.1").read_text() + file.read_text()
        assert {json.loads(line)["output_tokens"] for line in lines.splitlines()} == {expected}
    assert str(other) in caplog.text
