"""What `deterministic: true` costs: a decoding step with and without it, by length and company. Needs `make model`.

    python -m benchmarks.determinism [--quick]

A sequence of some length decodes alone and beside others of that length, on the demo's model in float32 and the
CPU kernels; steps with and without the flag alternate. Writes benchmarks/results/determinism.json; its ratios are the
median time of a step with the flag over that without, `alone_LENGTH` and `of_8_LENGTH`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

from benchmarks.prefix_handover import load_model
from benchmarks.results import write_rows
from paceline_server.engine.batch import Runner, SamplingParams, SequenceSlice, StepBatch

LENGTHS, COMPANIES = (256, 1024, 4096), (1, 8)
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Price:
    """Medians of a step in milliseconds."""

    length: int
    sequences: int
    plain_ms: float
    deterministic_ms: float


def measure(runner: Runner, block_size: int, length: int, sequences: int, steps: int) -> Price:
    """Time single decoding steps; what the keys and values are does not matter."""
    blocks = -(-length // block_size)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(steps):
        for flag, found in times.items():
            tables = [range(number * blocks, (number + 1) * blocks) for number in range(sequences)]
            slices = [SequenceSlice([9], length - 1, table, GREEDY, deterministic=flag) for table in tables]
            begin = perf_counter()
            runner.execute(StepBatch(slices))
            found.append(perf_counter() - begin)
    return Price(length, sequences, median(times[False]) * 1e3, median(times[True]) * 1e3)


def main() -> None:
    """Measure every length and company, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of the shorter lengths; writes nothing")
    quick = parser.parse_args().quick
    loaded = load_model(cpu_memory_gb=2.0)
    prices = [
        measure(loaded.runner, loaded.info.block_size, length, sequences, steps=3 if quick else 60)
        for length in (LENGTHS[:2] if quick else LENGTHS)
        for sequences in COMPANIES
    ]
    ratios = {
        f"{'alone' if one.sequences == 1 else f'of_{one.sequences}'}_{one.length}": one.deterministic_ms / one.plain_ms
        for one in prices
    }
    print(*prices, ratios, sep="\n")
    if not quick:
        write_rows("determinism", {"lengths": LENGTHS, "sequences": COMPANIES}, [asdict(p) for p in prices], ratios)


if __name__ == "__main__":
    main()
