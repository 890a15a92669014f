"""What a GPU holds and what a step needs of it, as measured. Called by `startup` to size the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch


def total_and_used() -> tuple[int, int]:
    """Bytes of its memory, and those that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total, total - free


def peak_of(run: Callable[[], None]) -> int:
    """Bytes that a run takes at most beyond what was taken before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def give_back() -> None:
    """Return memory that nothing refers to any more."""
    torch.cuda.empty_cache()
