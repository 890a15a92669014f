"""The command that profiles a step, as far as it does not measure."""

from __future__ import annotations

import runpy
import sys

import pytest


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--quik", 2)])
def test_help_and_a_misspelt_flag_measure_nothing(argument: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile takes minutes: nobody who asks what the command does should have to wait for one."""
    monkeypatch.setattr(sys, "argv", ["profile_step", argument])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.profile_step", run_name="__main__")
    assert ended.value.code == code
