"""Seeded traces for the policy benchmarks, and the pretended machine that they run on.

The machine is of the size of a GPU that serves a model of some billion parameters: a step costs 8 ms, a token 30 us
more, and attention 40 ns for a pair of tokens; steps vary by 5 %. It is not a measurement of any machine: the policy
benchmarks compare policies, and `benchmarks/simulator.py` holds the simulator to the real engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from paceline_server.engine.interface import Tier
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.simulator.driver import Pool
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.trace import TraceRequest

MACHINE = Machine(fixed=8e-3, by_token=30e-6, by_pair=40e-9, jitter=0.05)
POOL = Pool(num_blocks=4096)
LIMITS = SchedulerLimits(max_batch_size=64, max_tokens_in_batch=512)

TIERS = {Tier.INTERACTIVE: 0.3, Tier.STANDARD: 0.5, Tier.BATCH: 0.2}
"""Share of requests by tier."""


def sizes(random: Random) -> tuple[int, int]:
    """Prompt and output tokens of one request: log-normal, as in public chat traces; medians 200 and 74."""
    prompt = int(random.lognormvariate(5.3, 0.8))
    output = int(random.lognormvariate(4.3, 0.7))
    return min(2000, max(8, prompt)), min(500, max(4, output))


def poisson(rate: float, count: int, seed: int, tiers: dict[Tier, float] | None = None) -> list[TraceRequest]:
    """Requests that come at random.

    Args:
        rate: requests per second.
        tiers: share of requests by tier.
    """
    random, now, requests = Random(seed), 0.0, []
    shares = tiers or TIERS
    for _ in range(count):
        now += random.expovariate(rate)
        prompt, output = sizes(random)
        [tier] = random.choices(list(shares), list(shares.values()))
        requests.append(
            TraceRequest(arrival=now, prompt_tokens=prompt, output_tokens=output, max_tokens=512, tier=tier)
        )
    return requests


def at_once(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests, all there from the beginning."""
    return [request.model_copy(update={"arrival": 0.0}) for request in requests]
