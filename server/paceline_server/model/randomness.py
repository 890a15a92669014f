"""The random number behind every sampled token: a function of (seed, position) and of nothing else.

SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) is counter-based: output n of a
stream is a mix of `seed + n * gamma`. So no state is kept, and neither the batch nor the order of its rows matters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BITS = 48
"""Bits of a uniform number: few enough that its product with a float64 stays below that float64."""


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position).

    Seeds are mixed first: streams of neighbouring seeds, the usual choice, must not be shifts of one another.
    """
    return (outputs(_mix(seeds), positions) >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def outputs(states: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Output `position`, counted from 0, of the SplitMix64 generators that start at `states`."""
    return _mix(states + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Variant 13 of Stafford's 64-bit mixers, as SplitMix64 uses it. Products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
