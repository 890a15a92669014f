"""Measure every claim, write benchmarks/results/claims.json and the table of docs/claims.md.

    python -m benchmarks.claims [--quick] [KEY …]

About ten minutes on two quiet cores; `--quick` is for trying it, and writes nothing. With keys (function names below)
only those are measured, and the others keep what the result file says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from os import getpid
from typing import Any

from benchmarks.claims import batches, memory, prompts
from benchmarks.claims.rows import Measured
from benchmarks.machine import OthersMeter, float_format
from benchmarks.pages import fill
from benchmarks.real_engine import MODEL, load_model
from benchmarks.results import FOLDER, NOISY_CORES, write_rows

MEASUREMENTS: dict[str, Callable[..., Measured]] = {
    function.__name__: function
    for function in (
        batches.iteration_over_request,
        batches.over_generate,
        memory.paged_over_contiguous,
        prompts.prefix_cache,
        prompts.chunked_prefill,
        batches.packing,
        memory.swap_over_recompute,
        memory.block_size,
    )
}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="The field's claims, measured here")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; writes nothing")
    parser.add_argument("keys", nargs="*", metavar="KEY", help=f"of {', '.join(MEASUREMENTS)}; all without")
    arguments = parser.parse_args()
    unknown = set(arguments.keys) - set(MEASUREMENTS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such measurement")
    names = arguments.keys or list(MEASUREMENTS)
    loaded = load_model(float_format(), cpu_memory_gb=1.5, swap_space_gb=0.25)
    rows: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for name in names:
        others = OthersMeter([getpid()])
        measured = MEASUREMENTS[name](loaded, quick=arguments.quick)
        cores = others.read()
        noisy = cores > NOISY_CORES
        rows[name] = {"measurement": name, "others_cores": cores, "noisy": noisy, "details": measured.details}
        ratios |= measured.ratios
        shown = {key: round(value, 2) for key, value in measured.ratios.items()}
        print(name, shown, "(noisy)" if noisy else "", flush=True)
    if not arguments.quick:
        _write(rows, ratios)


def _write(rows: dict[str, Any], ratios: dict[str, float]) -> None:
    path = FOLDER / "claims.json"
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["measurement"]: row for row in old["runs"]} | rows
        ratios = old["ratios"] | ratios
    print(write_rows("claims", {"model": MODEL, "dtype": float_format()}, _ordered(rows), ratios))
    print(fill("claims"))


def _ordered(rows: dict[str, Any]) -> list[Any]:
    return [rows[name] for name in MEASUREMENTS if name in rows]


if __name__ == "__main__":
    main()
