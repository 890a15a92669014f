"""The random numbers behind every sampled token: functions of (seed, position, token id) and of nothing else.

Counter-based, so no state is kept, and neither the batch nor the order of its rows matters. A row's key comes from
SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), whose output n is a mix of
`seed + n * gamma`. Each token of the row then mixes its id with that key where the logits are: in `noise`, which calls
this as `native_sampler` does, or in csrc/sampler.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
WORD = 0x7FFFFFFF
"""Words have 31 bits: in int32, the type that vectorises, they are never negative and shifts bring in zeros."""


def keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """[2, R] words, the key of each row. Seeds are mixed first: those of neighbours must not be shifted streams."""
    whole = outputs(_mix(seeds), positions)
    return np.stack((whole >> np.uint64(33), (whole >> np.uint64(2)) & np.uint64(WORD))).astype(np.int32)


def outputs(states: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Output `position`, counted from 0, of the SplitMix64 generators that start at `states`."""
    return _mix(states + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Variant 13 of Stafford's 64-bit mixers, as SplitMix64 uses it. Products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
