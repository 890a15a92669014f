"""What a long simulation says of itself on stderr, while it runs."""

from io import StringIO

import pytest

from paceline_server import cli
from paceline_server.simulator.machine import VirtualClock
from paceline_server.simulator.progress import Progress
from paceline_server.simulator.trace import TraceRequest, write


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def fail_at(progress):
    progress.show("some")
    raise KeyError


@pytest.fixture
def clock():
    return VirtualClock()


def test_in_a_log_what_is_quick_says_nothing_and_what_is_not_says_so_now_and_then(clock):
    log = StringIO()
    with Progress(log, clock) as progress:
        for second in range(25):
            progress.show(f"at {second}")
            clock.advance(1.0)
    assert log.getvalue() == "at 1\nat 11\nat 21\n"


def test_on_a_terminal_one_line_moves_some_times_a_second_and_goes_at_the_end(clock):
    terminal = Terminal()
    with Progress(terminal, clock) as progress:
        for _ in range(100):
            progress.show("some")
            clock.advance(0.01)
        assert 9 <= terminal.getvalue().count("some") <= 11
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("some\r\x1b[K")


def test_the_line_goes_from_the_terminal_though_the_work_fails(clock):
    terminal = Terminal()
    progress = Progress(terminal, clock)
    with pytest.raises(KeyError), progress:
        fail_at(progress)
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_simulate_says_how_many_requests_have_come(tmp_path, capsys, monkeypatch):
    path = tmp_path / "trace.jsonl"
    write(path, [TraceRequest(arrival=0.0, prompt_tokens=5, output_tokens=5)] * 2)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert cli.main(["simulate", str(path)]) == 0
    assert "slo: 2 of 2 requests have come" in capsys.readouterr().err
