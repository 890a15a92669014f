"""Draws the next tokens of a batch in the CPU kernels: `sampler.sample`, many times faster where filters are set.

A row's filter ends at a logit, which counts and masses by range of logits find without sorting the vocabulary; and the
noise is computed for those tokens only that could still win by it. Called by `fused_decoder` once a step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline_server.model.native import ThreadPool
from paceline_server.model.packing import SamplingBatch
from paceline_server.model.randomness import keys
from paceline_server.model.sampler import COLDEST, ban

_DRAW = np.dtype(
    [
        *[("top_k", np.int64), ("temperature", np.float32), ("top_p", np.float32), ("min_p", np.float32)],
        *[("first_key", np.int32), ("second_key", np.int32)],
    ],
    align=True,
)
"""csrc/sampler.h."""


def sample(pool: ThreadPool, logits: Tensor, settings: SamplingBatch) -> list[int]:
    """Draw one token a row, each by one of the pool's threads.

    Args:
        logits: [R, V] float32, contiguous, on the CPU; overwritten.
        settings: of the R rows.
    """
    ban(logits, settings)
    draws = np.empty(len(logits), dtype=_DRAW)
    draws["temperature"] = np.where(settings.temperature < COLDEST, 0.0, settings.temperature)
    draws["top_k"], draws["top_p"], draws["min_p"] = settings.top_k, settings.top_p, settings.min_p
    draws["first_key"], draws["second_key"] = keys(settings.seeds, settings.positions)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    pool.library.call(
        "draw", pool.handle.address, logits.data_ptr(), *logits.shape, draws.ctypes.data, tokens.data_ptr()
    )
    chosen: list[int] = tokens.tolist()
    return chosen
