"""Number formats by name, as the configuration writes them, and bfloat16 for numpy, which lacks it.

Everything that runs without torch goes by these names; torch's own types have the same ones. An array of uint16 holds
the bits of bfloat16 numbers here, as the kernels read them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Bytes of a number."""

Floats = NDArray[np.float32]

Numbers = Floats | NDArray[np.uint16]
"""float32, or the bits of bfloat16."""


def widened(numbers: Numbers) -> Floats:
    """As float32, which holds every bfloat16; the array itself where it is float32 already."""
    if numbers.dtype == np.float32:
        return numbers.view(np.float32)
    return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrowed(numbers: Floats) -> NDArray[np.uint16]:
    """The nearest bfloat16 numbers, ties to even; what is not a number stays none."""
    bits = numbers.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    # A NaN is marked quiet instead of rounded, which could make an infinity of it.
    return (np.where(np.isnan(numbers), bits | np.uint32(0x400000), rounded) >> np.uint32(16)).astype(np.uint16)
