"""The random numbers behind every sampled token: functions of (seed, position, token id) and of nothing else.

Counter-based, so no state is kept, and neither the batch nor the order of its rows matters. A row's key comes from
SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), whose output n is a mix of
`seed + n * gamma`. Each token of the row then mixes its id with that key, for a whole batch at once where the logits
are. Called by `sampler`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = 0x7FFFFFFF
"""Words have 31 bits: in int32, the type that vectorises, they are never negative and shifts bring in zeros."""
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


def keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """[2, R] words, the key of each row. Seeds are mixed first: those of neighbours must not be shifted streams."""
    whole = outputs(_mix(seeds), positions)
    return np.stack((whole >> np.uint64(33), (whole >> np.uint64(2)) & np.uint64(_WORD))).astype(np.int32)


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


def outputs(states: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Output `position`, counted from 0, of the SplitMix64 generators that start at `states`."""
    return _mix(states + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)


@lru_cache(maxsize=4)
def _mixed_ids(vocabulary: int, device: torch.device) -> Tensor:
    """[V] the token ids as words without any pattern; kept, as every step needs them."""
    return _mix_words(torch.arange(vocabulary, dtype=torch.int32, device=device), None)


def _mix_words(values: Tensor, key: Tensor | None) -> Tensor:
    """Two rounds of xor-shift and multiply, the key between them. Overwrites `values`; products wrap around."""
    first, second = _MULTIPLIERS
    values.bitwise_xor_(values >> 16).mul_(first).bitwise_and_(_WORD)
    if key is not None:
        values.bitwise_xor_(key)
    values.bitwise_xor_(values >> 15).mul_(second).bitwise_and_(_WORD)
    return values.bitwise_xor_(values >> 16)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Variant 13 of Stafford's 64-bit mixers, as SplitMix64 uses it. Products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
