"""A fresh replica's first 50 requests, with and without the hot prefixes of the one before it. Needs `make model`.

    python -m benchmarks.prefix_handover [--quick]

Every request begins with one of some system prompts, the popular ones far more often than the others, and goes on with
words of its own. An old replica has seen 200 of them. The next 50 come to a fresh one on the demo's model: cold, and
after it took over the old one's hot prefixes. Rounds alternate. Writes benchmarks/results/prefix_handover.json:

- `ttft_first_50_with_over_without`: mean time to the first token with the handover over that without.
- `prefill_first_50_with_over_without`: the same of the prompt tokens that had to be computed.
- `handover_seconds`: what the start of the replica took longer (not a ratio; the price).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from random import Random
from statistics import fmean, median
from time import perf_counter, sleep

from benchmarks.real_engine import MODEL
from benchmarks.results import write_rows
from paceline_server.config import parse
from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.core import EngineCore
from paceline_server.engine.handover import compute
from paceline_server.engine.interface import GenerationRequest, PrefixList
from paceline_server.engine.loop import Loaded
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.model.startup import load

SYSTEM_PROMPTS, SYSTEM_TOKENS, USER_TOKENS, OUTPUT = 8, 512, 32, 16
SEEN, FIRST = 200, 50
SECONDS_BETWEEN = 0.5
LIMITS = SchedulerLimits(16, 512)
_LEAST_TOKEN, _MOST_TOKENS = 100, 40_000  # ids that are words, not marks


@dataclass(frozen=True, slots=True)
class FirstRequests:
    """One round on one replica; times in seconds."""

    handover: bool
    handover_seconds: float
    ttft_mean: float
    ttft_p50: float
    ttft_max: float
    prefill_tokens: int


def workload(count: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts; those of any seed share the system prompts, by a popularity of 1, 1/2, 1/3 and so on."""
    systems = [_words(Random(number), SYSTEM_TOKENS) for number in range(SYSTEM_PROMPTS)]
    weights = [1 / (rank + 1) for rank in range(SYSTEM_PROMPTS)]
    random = Random(seed)
    return [(*random.choices(systems, weights)[0], *_words(random, USER_TOKENS)) for _ in range(count)]


def _words(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(_LEAST_TOKEN, _MOST_TOKENS) for _ in range(count))


def fresh(loaded: Loaded) -> EngineCore:
    """A replica that has seen nothing: the model is loaded, its cache is empty."""
    return EngineCore(loaded.runner, loaded.info, LIMITS)


def known(loaded: Loaded) -> PrefixList:
    """What the old replica has found hot."""
    core = fresh(loaded)
    for number, prompt in enumerate(workload(SEEN, seed=1)):
        core.submit(_request(number, prompt))
        core.abort(str(number))
    return core.hot_prefixes("benchmark", 64)


def measure(loaded: Loaded, hot: PrefixList | None, count: int, seed: int) -> FirstRequests:
    """The first requests of a fresh replica, one every half second."""
    core = fresh(loaded)
    begin = perf_counter()
    if hot is not None:
        compute(core, hot.prefixes, lambda: True)
    handover = perf_counter() - begin
    before = core.stats().computed_tokens
    ttft = _run(core, workload(count, seed))
    return FirstRequests(
        handover=hot is not None,
        handover_seconds=handover,
        ttft_mean=fmean(ttft),
        ttft_p50=median(ttft),
        ttft_max=max(ttft),
        prefill_tokens=core.stats().computed_tokens - before - count * (OUTPUT - 1),
    )


def _run(core: EngineCore, prompts: list[tuple[int, ...]]) -> list[float]:
    begin, submitted = perf_counter(), 0
    ttft: dict[str, float] = {}
    while submitted < len(prompts) or core.has_work:
        now = perf_counter() - begin
        while submitted < len(prompts) and submitted * SECONDS_BETWEEN <= now:
            core.submit(_request(submitted, prompts[submitted]))
            submitted += 1
        if not core.has_work:
            sleep(max(0.0, submitted * SECONDS_BETWEEN - now))
            continue
        for output in core.step():
            due = int(output.request_id) * SECONDS_BETWEEN
            ttft.setdefault(output.request_id, perf_counter() - begin - due)
    return list(ttft.values())


def _request(number: int, prompt: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(str(number), prompt, OUTPUT, SamplingParams(temperature=0.0), ignore_eos=True)


def load_model(cpu_memory_gb: float = 1.0) -> Loaded:
    """The demo's model in float32 on the CPU."""
    engine = {"model_path": MODEL, "dtype": "float32", "device": "cpu"}
    config = parse({"engine": engine, "kv_cache": {"cpu_memory_gb": cpu_memory_gb}})
    loaded = load(config, lambda _: None)
    assert isinstance(loaded, Loaded)
    return loaded


def main() -> None:
    """Run the rounds and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 6 requests; writes nothing")
    quick = parser.parse_args().quick
    loaded = load_model()
    hot = known(loaded)
    rounds = []
    for seed in [2] if quick else [2, 3, 4]:
        for prefixes in (None, hot):
            rounds.append(measure(loaded, prefixes, 6 if quick else FIRST, seed))
            print(rounds[-1])
    cold, warm = ([one for one in rounds if one.handover is kind] for kind in (False, True))
    ratios = {
        "ttft_first_50_with_over_without": fmean(r.ttft_mean for r in warm) / fmean(r.ttft_mean for r in cold),
        "prefill_first_50_with_over_without": fmean(r.prefill_tokens for r in warm)
        / fmean(r.prefill_tokens for r in cold),
        "handover_seconds": fmean(r.handover_seconds for r in warm),
    }
    print(ratios)
    if not quick:
        shape = {"system_prompts": SYSTEM_PROMPTS, "system_tokens": SYSTEM_TOKENS, "user_tokens": USER_TOKENS}
        more = {"output_tokens": OUTPUT, "seen": SEEN, "first": FIRST, "seconds_between": SECONDS_BETWEEN}
        write_rows("prefix_handover", shape | more, [asdict(one) for one in rounds], ratios)


if __name__ == "__main__":
    main()
