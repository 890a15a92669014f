"""The simulator is held to the real engine: the same arrivals, on the model and on a machine of the costs it showed.

The costs are those of the very run that is simulated, and add up to its steps' times: another program that slows the
machine down makes both slower. All requests come within two seconds, so that times are sums of many steps.
"""

from statistics import median

import pytest

from benchmarks.real_engine import run, timed_core
from benchmarks.simulator import LIMITS, measure, trace

pytestmark = pytest.mark.timeout(600)


def test_simulated_times_to_first_tokens_and_throughput_are_within_15_percent_of_the_real_ones():
    core, runner = timed_core(LIMITS)
    run(core, trace(100.0, 8, seed=0))
    results = [measure(core, runner, trace(30.0, 24, seed), seed) for seed in (1, 2, 3)]
    assert median(result.errors[0] for result in results) <= 0.15, results
    assert median(result.errors[1] for result in results) <= 0.15, results
