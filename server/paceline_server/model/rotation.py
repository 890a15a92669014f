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

import torch
from torch import Tensor

_WIDEST = 1024
"""Largest factor of a rotation: a product with all of them costs n times their sum, not n times n."""

_WIDEST_HADAMARD = 64
"""The same for the one that is computed in each step."""


class Rotation:
    """An orthogonal matrix Q [n, n], as a Kronecker product of small ones without zeros or outliers of their own."""

    def __init__(self, size: int) -> None:
        self._factors = [_orthogonal(factor) for factor in _factors(size)]

    def apply(self, rows: Tensor) -> Tensor:
        """Rows [m, n] times Q, in float32."""
        result, behind = rows.to(torch.float32), 1
        for factor in reversed(self._factors):
            parts = result.reshape(-1, len(factor), behind)
            result = parts[..., 0] @ factor if behind == 1 else factor.T @ parts
            behind *= len(factor)
        return result.reshape(rows.shape)

    def apply_left(self, columns: Tensor) -> Tensor:
        """Q transposed times columns [n, m] or [n]."""
        if columns.dim() == 1:
            return self.apply(columns[None])[0]
        return self.apply(columns.T).T.contiguous()


Weights = dict[str, Tensor | None]
"""A layer's tensors by the names of `native.LayerSource`."""


def rotate_stream(weights: Weights, rotation: Rotation) -> None:
    """Make a layer read and write a residual stream that is rotated. Its norms precede attention and MLP."""
    for norm, readers in (("attention_norm", ("query", "key", "value")), ("mlp_norm", ("gate", "up"))):
        factors = _present(weights, norm)
        for name in readers:
            weights[name] = rotation.apply(_present(weights, name) * factors)
        weights[norm] = torch.ones_like(factors)
    for name in ("output", "output_bias", "down", "down_bias"):
        tensor = weights.get(name)
        if tensor is not None:
            weights[name] = rotation.apply_left(tensor)


def rotate_values(weights: Weights, head_dim: int) -> None:
    """Rotate each head's values, and undo it in the output projection: attention only mixes rows of values."""
    rotation = Rotation(head_dim)
    value, output = _present(weights, "value"), _present(weights, "output")
    by_head = value.view(-1, head_dim, value.shape[1]).transpose(1, 2)  # [K, hidden, D]
    turned = rotation.apply(by_head.reshape(-1, head_dim)).view(by_head.shape)
    weights["value"] = turned.transpose(1, 2).reshape(value.shape).contiguous()
    weights["output"] = rotation.apply(output.reshape(-1, head_dim)).view(output.shape)
    bias = weights.get("value_bias")
    if bias is not None:
        weights["value_bias"] = rotation.apply(bias.view(-1, head_dim)).view(-1)


def hadamard_factor(size: int) -> int:
    """Factor of the rotation that is computed in each step: see `hadamard` in csrc/rows.h."""
    return math.gcd(size, _WIDEST_HADAMARD)


def rotate_down_inputs(weights: Weights, factor: int) -> None:
    """Undo in the down projection what csrc/rows.h's `hadamard` does to its inputs."""
    down = _present(weights, "down")
    parts = down.view(len(down), factor, -1)
    weights["down"] = torch.einsum("ofr,fg->ogr", parts, _orthogonal(factor)).reshape(down.shape).contiguous()


def _present(weights: Weights, name: str) -> Tensor:
    tensor = weights[name]
    assert tensor is not None, f"every layer has {name}"
    return tensor.to(torch.float32)


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


def _orthogonal(size: int) -> Tensor:
    """[n, n] whose elements are all of about the same size: Hadamard's matrix, or the cosines of a DCT."""
    if size & (size - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return (matrix / math.sqrt(size)).to(torch.float32)
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos((2 * index[:, None] + 1) * index[None, :] * (math.pi / (2 * size))) * math.sqrt(2 / size)
    matrix[:, 0] = 1 / math.sqrt(size)
    return matrix.to(torch.float32)
