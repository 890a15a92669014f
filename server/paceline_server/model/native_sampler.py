"""Draws the next tokens of a batch in the CPU kernels: `sampler.sample`, many times faster where filters are set.

A row's filter ends at a logit, which counts and masses by range of logits find without sorting the vocabulary; and the
noise is computed for those tokens only that could still win by it. Called by `fused_decoder` once a step.
"""

from __future__ import annotations

import math

import numpy as np

from paceline_server.model.formats import Floats
from paceline_server.model.native import ThreadPool, address
from paceline_server.model.packing import COLDEST, SamplingBatch
from paceline_server.model.randomness import keys

_DRAW = np.dtype(
    [
        *[("top_k", np.int64), ("temperature", np.float32), ("top_p", np.float32), ("min_p", np.float32)],
        *[("first_key", np.int32), ("second_key", np.int32)],
    ],
    align=True,
)
"""csrc/sampler.h."""


def sample(pool: ThreadPool, logits: Floats, settings: SamplingBatch) -> list[int]:
    """Draw one token a row, each by one of the pool's threads.

    Args:
        logits: [R, V], contiguous; overwritten.
        settings: of the R rows.
    """
    if len(settings.banned[0]):
        logits[settings.banned] = -math.inf
    draws = np.zeros(len(logits), dtype=_DRAW)  # all greedy
    random = settings.temperature >= COLDEST
    if random.any():
        draws["temperature"] = np.where(random, settings.temperature, 0.0)
        draws["top_k"], draws["top_p"], draws["min_p"] = settings.top_k, settings.top_p, settings.min_p
        draws["first_key"], draws["second_key"] = keys(settings.seeds, settings.positions)
    tokens = np.empty(len(logits), dtype=np.int64)
    pool.library.call(
        "draw",
        pool.handle.address,
        address(logits, np.float32),
        *logits.shape,
        draws.ctypes.data,
        address(tokens),
    )
    chosen: list[int] = tokens.tolist()
    return chosen
