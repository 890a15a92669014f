"""Where the time of a step goes on a CPU, by stage of the kernels: `make profile`.

    python -m benchmarks.profile_step            # --quick: two steps of each kind

Prints a table, milliseconds a step: the stages of `FusedDecoder.seconds`, and beside them what the runner does outside
the kernels (packing, rotary tables, sampling). Writes nothing: what is found worth keeping goes into
docs/performance.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.machine import float_format
from paceline_server.config import parse
from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.model.fused_decoder import STAGES
from paceline_server.model.startup import load

STEPS = 12
CONTEXT = 256
BLOCK = 16
SAMPLING = SamplingParams()


def decodes(count: int) -> StepBatch:
    """One token of each of `count` sequences, after CONTEXT others."""
    blocks = CONTEXT // BLOCK + 1
    return StepBatch(
        [SequenceSlice([7], CONTEXT, range(row * blocks, (row + 1) * blocks), SAMPLING) for row in range(count)]
    )


def prefill() -> StepBatch:
    """The first CONTEXT tokens of a sequence."""
    return StepBatch([SequenceSlice(list(range(CONTEXT)), 0, range(CONTEXT // BLOCK), SAMPLING)])


def profile(runner: Any, batch: StepBatch, steps: int) -> dict[str, float]:
    """Mean milliseconds of a step, by stage; `outside` is what the kernels did not spend."""
    decoder = runner.model.decoder
    runner.execute(batch)
    before, begin = decoder.seconds(), perf_counter()
    for _ in range(steps):
        runner.execute(batch)
    total, after = perf_counter() - begin, decoder.seconds()
    stages = {stage: (after[stage] - before[stage]) / steps * 1e3 for stage in STAGES}
    return stages | {"outside": total / steps * 1e3 - sum(stages.values()), "step": total / steps * 1e3}


def main(folder: Path, *, quick: bool) -> None:
    """Print the table, of the float format and of int8, one after the other."""
    kinds = {"decode 1": decodes(1), "decode 4": decodes(4), "decode 16": decodes(16), f"prefill {CONTEXT}": prefill()}
    columns = (*STAGES, "outside", "step")
    for quantization in (None, "int8"):
        engine = {"model_path": str(folder), "device": "cpu", "dtype": float_format(), "quantization": quantization}
        runner = load(parse({"engine": engine, "kv_cache": {"block_size_tokens": BLOCK}}), lambda _: None).runner
        print(f"| {quantization or float_format()} | " + " | ".join(columns) + " |")
        print("|---" * (len(columns) + 1) + "|")
        for name, batch in kinds.items():
            figures = profile(runner, batch, 2 if quick else STEPS)
            print(f"| {name} | " + " | ".join(f"{figures[column]:.2f}" for column in columns) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps of each kind")
    model = Path.home() / ".cache/paceline/models/HuggingFaceTB/SmolLM2-135M-Instruct"
    main(model, quick=parser.parse_args().quick)
