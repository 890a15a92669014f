"""Claims about prompts: prefixes that are shared, and long ones that come while others generate."""

from __future__ import annotations

from dataclasses import asdict
from random import Random

from benchmarks.claims.rows import Measured
from benchmarks.clients import ClosedLoop, Job, run_clients
from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.loop import Loaded
from paceline_server.engine.scheduler import SchedulerLimits

_PREFIX = 768
_LONG = 3000
_CLIENTS = 9


def prefix_cache(loaded: Loaded, *, quick: bool) -> Measured:
    """Requests/s with the cache over without it: one prefix of 768 tokens, own ends of 33 to 96, answers of 16."""
    random = Random(0)
    words = loaded.info.vocab_size
    shared = tuple(random.randrange(words) for _ in range(_PREFIX))
    jobs = [
        Job(shared + tuple(random.randrange(words) for _ in range(random.randint(33, 96))), 16)
        for _ in range(6 if quick else 32)
    ]
    runs = {
        name: run_clients(_core(loaded, SchedulerLimits(16, 512), caching=caching), jobs, 16)
        for name, caching in (("cached", True), ("uncached", False))
    }
    return Measured(
        {"prefix_cache": runs["uncached"].seconds / runs["cached"].seconds},
        {name: asdict(run) for name, run in runs.items()},
    )


def chunked_prefill(loaded: Loaded, *, quick: bool) -> Measured:
    """Nine clients; one of five requests has a prompt of 3000 tokens, the others, which are watched, have 64.

    Whole: the budget of a step holds any prompt. Chunked: a step computes 128 tokens, those that generate first.
    """
    jobs = _with_long_prompts(loaded.info.vocab_size, rounds=2 if quick else 12)
    runs: dict[str, ClosedLoop] = {}
    for name, budget in (("whole", 2 * _LONG), ("chunked", 128)):
        core = _core(loaded, SchedulerLimits(_CLIENTS, budget), caching=False)
        runs[name] = run_clients(core, jobs, _CLIENTS, watched=lambda job: len(job.prompt) < _LONG)
    return Measured(
        {
            "chunked_itl": runs["whole"].itl_p99 / runs["chunked"].itl_p99,
            "chunked_ttft_spread": runs["whole"].ttft_spread / runs["chunked"].ttft_spread,
        },
        {name: asdict(run) for name, run in runs.items()},
    )


def _with_long_prompts(words: int, rounds: int) -> list[Job]:
    """Short prompts only at first; then in each round a long one and four short ones.

    Answers of the short ones differ in length, so that somebody generates whenever a long prompt comes. Long prompts
    are so frequent that the pauses they make are more than one in a hundred.
    """
    random = Random(1)

    def job(prompt: int, output: int) -> Job:
        return Job(tuple(random.randrange(words) for _ in range(prompt)), output)

    def short(count: int) -> list[Job]:
        return [job(64, random.randint(32, 96)) for _ in range(count)]

    return short(_CLIENTS) + [one for _ in range(rounds) for one in (job(_LONG, 16), *short(4))]


def _core(loaded: Loaded, limits: SchedulerLimits, *, caching: bool) -> EngineCore:
    """A core whose steps are bounded by the token budget alone: no tier has a target for its time per token."""
    tiers = {name: {"tpot_ms": None} for name in ("interactive", "standard", "batch")}
    scheduling = SchedulingConfig.model_validate({"policy": "fcfs", "admission": "none", "tiers": tiers})
    return EngineCore(loaded.runner, loaded.info, limits, scheduling, prefix_caching=caching)
