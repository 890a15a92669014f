"""Claims about KV memory: paging, swapping, and the size of a block."""

from __future__ import annotations

from random import Random
from statistics import mean
from time import perf_counter

from benchmarks.claims.rows import Measured
from benchmarks.machine import float_format
from benchmarks.real_engine import load_model
from benchmarks.traces import MACHINE, at_once, poisson
from paceline_server.config import SchedulingConfig
from paceline_server.engine.batch import Runner, SamplingParams, SequenceSlice, StepBatch
from paceline_server.engine.loop import Loaded
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.simulator.driver import Pool, Simulation

_POOL_TOKENS = 16_384
_LONGEST = 2048  # of a sequence; what room for the longest means
_BLOCK_SIZES = (8, 16, 32, 64, 128)
_SEQUENCES, _CONTEXT = 16, 512


def paged_over_contiguous(_: Loaded, *, quick: bool) -> Measured:
    """Sequences that run at once in a pool of 16,384 tokens, while more are waiting.

    Room for the longest sequence is a block of its size: the same scheduler serves both.
    """
    held = {size: _sequences_held(size, 200 if quick else 1000) for size in (16, _LONGEST)}
    return Measured(
        {"paged_over_contiguous": held[16] / held[_LONGEST]}, {f"block_{size}": count for size, count in held.items()}
    )


def swap_over_recompute(loaded: Loaded, *, quick: bool) -> Measured:
    """Seconds of a prefill of n tokens over seconds to copy their blocks to host memory and back, by n."""
    size, copy = loaded.info.block_size, loaded.info.block_copy_seconds
    ratios, details = {}, {}
    for tokens in (256, 1024) if quick else (64, 256, 1024, 4096):
        recompute = min(_prefill_seconds(loaded.runner, tokens, size) for _ in range(2))
        swap = 2 * copy * -(-tokens // size)
        ratios["swap_over_recompute" + ("" if tokens == 1024 else f"_{tokens}")] = recompute / swap
        details[str(tokens)] = {"recompute_seconds": recompute, "swap_seconds": swap}
    return Measured(ratios, details)


def block_size(_: Loaded, *, quick: bool) -> Measured:
    """Decode speed of 16 sequences at 512 tokens of context, and memory lost at their ends, by the size of a block."""
    speed, lost = {}, {}
    for size in (16, 128) if quick else _BLOCK_SIZES:
        loaded = load_model(float_format(), block_size_tokens=size)
        speed[size] = _SEQUENCES / _decode_seconds(loaded.runner, size, 4 if quick else 40)
        lost[size] = _lost_share(size)
        del loaded
    ratios = {"block_size": speed[128] / speed[16]}
    ratios |= {f"block_size_{size}": speed[size] / speed[16] for size in speed if size not in (16, 128)}
    details = {str(size): {"tokens_per_second": speed[size], "memory_lost": lost[size]} for size in speed}
    return Measured(ratios, details)


def _sequences_held(size: int, count: int) -> float:
    """Mean number of running sequences while others wait."""
    trace = at_once(poisson(1.0, count, seed=0))
    limits = SchedulerLimits(max_batch_size=512, max_tokens_in_batch=2048)
    run = Simulation(
        [one.model_copy(update={"max_tokens": one.output_tokens}) for one in trace],
        MACHINE,
        Pool(_POOL_TOKENS // size, size, prefix_caching=False),
        limits,
        SchedulingConfig(policy="fcfs", admission="none"),
    )
    held = []
    while not run.done:
        run.advance()
        if run.core.scheduler.waiting:
            held.append(len(run.core.scheduler.running))
    return mean(held)


def _prefill_seconds(runner: Runner, tokens: int, size: int, chunk: int = 512) -> float:
    """Time to compute a prompt, chunk by chunk, as after a preemption."""
    table = range(-(-tokens // size))
    begin = perf_counter()
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        runner.execute(StepBatch([SequenceSlice([start % 997 + 1] * count, start, table, None)]))
    return perf_counter() - begin


def _decode_seconds(runner: Runner, size: int, steps: int) -> float:
    """Median time of a step in which each sequence gets a token; the content of the KV cache does not matter."""
    blocks = -(-(_CONTEXT + 1) // size)
    greedy = SamplingParams(temperature=0.0)
    slices = [
        SequenceSlice([number + 1], _CONTEXT, range(number * blocks, (number + 1) * blocks), greedy)
        for number in range(_SEQUENCES)
    ]
    times = []
    for _ in range(steps):
        begin = perf_counter()
        runner.execute(StepBatch(slices))
        times.append(perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def _lost_share(size: int) -> float:
    """Share of the memory of blocks that no token lies in, over sequences of 16 to 1024 tokens."""
    random = Random(0)
    lengths = [random.randint(16, 1024) for _ in range(10_000)]
    held = sum(-(-length // size) * size for length in lengths)
    return 1.0 - sum(lengths) / held
