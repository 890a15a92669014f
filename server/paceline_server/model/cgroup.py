"""What the container's control group allows, under version 1 and version 2. Called by `machine`.

Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel, and scheduler/sched-bwc.rst.
A container sees its own group at the root of the mount. What is not there is not limited.
"""

from __future__ import annotations

from pathlib import Path


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that the group may use; None without a limit."""
    unified = root / "cpu.max"
    if unified.is_file():
        limit, period = _text(unified).split()
        return None if limit == "max" else int(limit) / int(period)
    quota = root / "cpu" / "cpu.cfs_quota_us"
    if not quota.is_file() or int(_text(quota)) < 0:
        return None
    return int(_text(quota)) / int(_text(quota.with_name("cpu.cfs_period_us")))


def memory_left(root: Path) -> int | None:
    """Bytes that the group can still take, its page cache counted as free; None without a limit."""
    unified, divided = root / "memory.max", root / "memory" / "memory.limit_in_bytes"
    if unified.is_file():
        return _left(unified, unified.with_name("memory.current"), prefix="")
    if divided.is_file():  # `total_` counts what is below the group too, as version 2 always does
        return _left(divided, divided.with_name("memory.usage_in_bytes"), prefix="total_")
    return None


def _left(limit: Path, usage: Path, prefix: str) -> int | None:
    if _text(limit) == "max":
        return None
    statistics = dict(line.split() for line in _text(limit.with_name("memory.stat")).splitlines())
    page_cache = sum(int(statistics.get(f"{prefix}{kind}", 0)) for kind in ("inactive_file", "active_file"))
    return max(0, int(_text(limit)) - int(_text(usage)) + page_cache)


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()
