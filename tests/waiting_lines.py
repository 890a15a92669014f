"""Waiting lines of every policy, and sequences to put into them."""

from paceline_server.config import SchedulingConfig
from paceline_server.engine.interface import GenerationRequest
from paceline_server.engine.policies import ttft_targets, waiting_line
from paceline_server.engine.sequence import Sequence

POLICIES = ("slo", "fcfs", "priority", "sjf")
TARGETS = ttft_targets(SchedulingConfig().tiers)
PROMOTE_AFTER = 10.0

numbers = iter(range(1, 1 << 60))


def line_of(policy):
    scheduling = SchedulingConfig(policy=policy, promote_after_seconds=PROMOTE_AFTER)
    return waiting_line(scheduling, cached_tokens=lambda one: 0)


def sequence(name, arrival=0.0, prompt=4, max_tokens=4, **options):
    request = GenerationRequest(name, (1,) * prompt, max_tokens, **options)
    return Sequence(request, arrival, max_tokens, number=next(numbers))


def fill(line, *sequences):
    for one in sequences:
        line.push(one, one.arrival)
    return line


def drain(line, now=0.0):
    order = []
    while (one := line.take(now)) is not None:
        order.append(one.request_id)
    assert len(line) == line.num_tokens == 0
    return order
