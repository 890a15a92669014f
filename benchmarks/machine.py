"""Facts of the machine that figures need beside them, and who else used it meanwhile."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

_INTERESTING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
_TICKS = os.sysconf("SC_CLK_TCK")


def facts() -> dict[str, Any]:
    """Processor, cores, memory, kernel and the versions that matter."""
    info = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", "").split())
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "processor": fields.get("model name", "unknown"),
        "family_model": f"{fields.get('cpu family')}/{fields.get('model')}",
        "cores": os.cpu_count(),
        "flags": [flag for flag in _INTERESTING_FLAGS if flag in flags],
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "aiohttp", "tokenizers")},
    }


def cores() -> list[int]:
    """Those that this process, and what it starts, may run on: every server gets a thread for each."""
    return sorted(os.sched_getaffinity(0))


def float_format() -> str:
    """Weights that this processor multiplies fastest without quantizing: bfloat16 where it has instructions for it."""
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(facts()["flags"]) else "float32"


def tree(pid: int) -> list[int]:
    """A process and all its descendants that are alive now."""
    found, open_ends = [], [pid]
    while open_ends:
        current = open_ends.pop()
        try:
            tasks = list(Path(f"/proc/{current}/task").iterdir())
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:  # it has ended meanwhile
            continue
        found.append(current)
        open_ends += children
    return found


def rss_bytes(pids: list[int]) -> int:
    """Resident memory of the processes; pages that they share count once for each."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


class OthersMeter:
    """Cores that processes other than ours used between start and `read`.

    Args:
        ours: roots of the process trees that belong to the measurement.
    """

    def __init__(self, ours: list[int]) -> None:
        self._ours = ours
        self._begin = (perf_counter(), _machine_ticks(), self._own_ticks())

    def read(self) -> float:
        """Mean number of cores since the start."""
        seconds, total, own = self._begin
        elapsed = perf_counter() - seconds
        others = (_machine_ticks() - total) - (self._own_ticks() - own)
        return max(0.0, others / _TICKS / elapsed)

    def _own_ticks(self) -> int:
        return sum(_process_ticks(pid) for root in self._ours for pid in tree(root))


def _machine_ticks() -> int:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    busy = [int(value) for index, value in enumerate(fields[:8]) if index not in (3, 4)]  # without idle and iowait
    return sum(busy)


def _process_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
