"""What the control group that we run in may use, under version 1 and version 2. Called by `machine`.

Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel, and scheduler/sched-bwc.rst.
A container sees its own group at the root of the mount. What is not there is not limited.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path


def cpu_quota(root: Path) -> Decimal | None:
    """Cores' worth of time, None without a limit."""
    unified = root / "cpu.max"
    if unified.is_file():
        limit, period = _text(unified).split()
        return None if limit == "max" else Decimal(limit) / Decimal(period)
    quota = root / "cpu" / "cpu.cfs_quota_us"
    if not quota.is_file() or int(_text(quota)) < 0:
        return None
    return Decimal(_text(quota)) / Decimal(_text(quota.with_name("cpu.cfs_period_us")))


def memory_limit(root: Path) -> int | None:
    """Bytes, None without a limit; version 1 says a number larger than any machine for that."""
    for file in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        if file.is_file():
            text = _text(file)
            return None if text == "max" else int(text)
    return None


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()
