"""Random numbers for every token of a vocabulary, by torch: see `randomness`. Called by `sampler`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline_server.model.randomness import WORD, keys

_MULTIPLIERS = (0x7FEB352D, 0x046CA68B)
"""Those of lowbias32 (Wellons, "Prospecting for hash functions", 2018), modulo 2^31."""
_STEP = (1 - 2.0**-24) * 2.0**-31
"""Makes (0, 1) of an odd word. The factor keeps the largest, which float32 rounds up to 2^31, below 1."""


def gumbels(seeds: NDArray[np.uint64], positions: NDArray[np.int64], like: Tensor) -> Tensor:
    """Standard Gumbel noise for each (seed, position) and token: [R, V] float32, V and the device those of `like`.

    It lies between -2.9 and 21.5.
    """
    words_of_key = torch.from_numpy(keys(seeds, positions)[:, :, None]).to(like.device)  # [2, R, 1]
    return gumbel(words(_mixed_ids(like.shape[-1], like.device), words_of_key[0], words_of_key[1]))


def words(ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A random word for each of the ids, which are mixed already, under two words of key; broadcasts, int32.

    The second key keeps apart rows whose first keys only permute the ids.
    """
    return _mix_words(ids ^ first, second)


def gumbel(uniform: Tensor) -> Tensor:
    """Random words as Gumbel noise, -log(-log(1 - w)) with w in (0, 1); overwrites them.

    w is exact where it is small, which is where the large values come from that win against many tokens.
    """
    return uniform.bitwise_or_(1).float().mul_(-_STEP).log1p_().neg_().log_().neg_()


@lru_cache(maxsize=4)
def _mixed_ids(vocabulary: int, device: torch.device) -> Tensor:
    """[V] the token ids as words without any pattern; kept, as every step needs them."""
    return _mix_words(torch.arange(vocabulary, dtype=torch.int32, device=device), None)


def _mix_words(values: Tensor, key: Tensor | None) -> Tensor:
    """Two rounds of xor-shift and multiply, the key between them. Overwrites `values`; products wrap around."""
    first, second = _MULTIPLIERS
    values.bitwise_xor_(values >> 16).mul_(first).bitwise_and_(WORD)
    if key is not None:
        values.bitwise_xor_(key)
    values.bitwise_xor_(values >> 15).mul_(second).bitwise_and_(WORD)
    return values.bitwise_xor_(values >> 16)
