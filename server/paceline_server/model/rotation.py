"""Turns a model's weights so that its activations have no outliers, which 8 bits could not hold. For int8 alone.

A few channels of a decoder's activations are far larger than the others; the range of a token's bytes is theirs, and
the rest is rounded away. An orthogonal matrix Q spreads every channel over all of them, and changes nothing else: RMS
norms do not see a rotation of their input, so Q can be merged into the weights on either side of the residual stream,
once, at load. (The idea is QuaRot's, Ashkboos et al. 2024.) Heads are rotated likewise between values and output. What
the down projection reads is no linear function of anything, so it is rotated in each step, by the cheapest matrix.

    stream' = stream Q      embedding' = E Q      inputs of a layer: W' = W diag(norm) Q      outputs: W' = Q^T W

`fused_decoder` calls it between reading a layer's weights and packing them.
"""

from __future__ import annotations

import math

import numpy as np

from paceline_server.model.formats import Floats, Numbers, widened

_WIDEST = 1024
"""Largest factor of a rotation: a product with all of them costs n times their sum, not n times n."""

_WIDEST_HADAMARD = 64
"""The same for the one that is computed in each step."""


_LARGEST_HADAMARD_BITS = 7
"""Hadamard's matrices of up to 128 are applied as they are, larger ones by parts: smaller parts move more memory."""


class Rotation:
    """An orthogonal matrix Q [n, n], as a Kronecker product of small ones without zeros or outliers of their own."""

    def __init__(self, size: int) -> None:
        self._factors = [_orthogonal(factor) for factor in _in_small_parts(_factors(size))]

    def apply(self, rows: Floats) -> Floats:
        """Rows [m, n] times Q."""
        result, behind = rows, 1
        for factor in reversed(self._factors):
            parts = result.reshape(-1, len(factor), behind).swapaxes(1, 2)  # [m', behind, factor]
            # One product of all rows: of many thin ones, numpy computes each by itself, a hundred times as slowly.
            product = parts.reshape(-1, len(factor)) @ factor
            result = product.reshape(parts.shape).swapaxes(1, 2)
            behind *= len(factor)
        turned: Floats = result.reshape(rows.shape)
        return turned

    def apply_left(self, columns: Floats) -> Floats:
        """Q transposed times columns [n, m] or [n]."""
        if columns.ndim == 1:
            return self.apply(columns[None]).reshape(columns.shape)
        return np.ascontiguousarray(self.apply(np.ascontiguousarray(columns.T)).T)


Weights = dict[str, Numbers]
"""A layer's tensors by the names of `native.LayerSource`."""


def rotate_stream(weights: Weights, rotation: Rotation) -> None:
    """Make a layer read and write a residual stream that is rotated. Its norms precede attention and MLP."""
    for norm, readers in (("attention_norm", ("query", "key", "value")), ("mlp_norm", ("gate", "up"))):
        factors = widened(weights[norm])
        for name in readers:
            weights[name] = rotation.apply(widened(weights[name]) * factors)
        weights[norm] = np.ones_like(factors)
    for name in ("output", "output_bias", "down", "down_bias"):
        if name in weights:
            weights[name] = rotation.apply_left(widened(weights[name]))


def rotate_values(weights: Weights, head_dim: int) -> None:
    """Rotate each head's values, and undo it in the output projection: attention only mixes rows of values."""
    rotation = Rotation(head_dim)
    value, output = widened(weights["value"]), widened(weights["output"])
    by_head = value.reshape(-1, head_dim, value.shape[1]).swapaxes(1, 2)  # [K, hidden, D]
    turned = rotation.apply(by_head.reshape(-1, head_dim)).reshape(by_head.shape)
    # Of a single head, the reshape alone would be a view in the wrong order.
    weights["value"] = np.ascontiguousarray(turned.swapaxes(1, 2).reshape(value.shape))
    weights["output"] = rotation.apply(output.reshape(-1, head_dim)).reshape(output.shape)
    if "value_bias" in weights:
        weights["value_bias"] = rotation.apply(widened(weights["value_bias"]).reshape(-1, head_dim)).reshape(-1)


def hadamard_factor(size: int) -> int:
    """Factor of the rotation that is computed in each step: see `hadamard` in csrc/rows.h."""
    return math.gcd(size, _WIDEST_HADAMARD)


def rotate_down_inputs(weights: Weights, factor: int) -> None:
    """Undo in the down projection what csrc/rows.h's `hadamard` does to its inputs."""
    down = widened(weights["down"])
    parts = down.reshape(len(down), factor, -1)
    weights["down"] = (_orthogonal(factor).T @ parts).reshape(down.shape)


def _factors(size: int) -> list[int]:
    """Split into factors of at most `_WIDEST`, as far as it goes."""
    factors, rest, factor = [1], size, 2
    while rest > 1:
        if rest % factor:
            factor = rest if factor * factor > rest else factor + 1
            continue
        rest //= factor
        if factors[-1] * factor <= _WIDEST:
            factors[-1] *= factor
        else:
            factors.append(factor)
    return factors


def _in_small_parts(factors: list[int]) -> list[int]:
    """Factors of the same matrix: Hadamard's, which come first, are products of smaller ones and cheaper by them."""
    hadamard = [factor for factor in factors if _is_power_of_two(factor)]
    bits = math.prod(hadamard).bit_length() - 1
    count = math.ceil(bits / _LARGEST_HADAMARD_BITS)
    return [*(1 << (bits + index) // count for index in range(count)), *factors[len(hadamard) :]]


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def _orthogonal(size: int) -> Floats:
    """[n, n] whose elements are all of about the same size: Hadamard's matrix, or the cosines of a DCT."""
    if _is_power_of_two(size):
        matrix = np.ones((1, 1))
        while len(matrix) < size:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        return (matrix / math.sqrt(size)).astype(np.float32)
    index = np.arange(size, dtype=np.float64)
    matrix = np.cos((2 * index[:, None] + 1) * index[None, :] * (math.pi / (2 * size))) * math.sqrt(2 / size)
    matrix[:, 0] = 1 / math.sqrt(size)
    return matrix.astype(np.float32)
