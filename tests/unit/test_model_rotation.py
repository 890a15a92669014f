"""The rotation of int8's weights is one orthogonal matrix, however it is computed."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from paceline_server.model.formats import Floats
from paceline_server.model.rotation import Rotation, _factors, _orthogonal

SIZES = [1, 2, 7, 64, 96, 128, 576, 1024, 1152, 2048, 3072]


def matrix(size: int) -> Floats:
    """Q, whole, as the product of the factors that the module's text names."""
    whole: Floats = reduce(np.kron, [_orthogonal(factor) for factor in _factors(size)])
    return whole


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_multiplied_by_the_product_of_all_factors(size: int) -> None:
    rows = np.random.default_rng(0).standard_normal((5, size), dtype=np.float32)
    assert np.allclose(Rotation(size).apply(rows), rows @ matrix(size), atol=2e-5)


@pytest.mark.parametrize("size", SIZES)
def test_columns_are_multiplied_by_the_transpose_from_the_left(size: int) -> None:
    columns = np.random.default_rng(0).standard_normal((size, 3), dtype=np.float32)
    rotation = Rotation(size)
    assert np.allclose(rotation.apply_left(columns), matrix(size).T @ columns, atol=2e-5)
    assert np.allclose(rotation.apply_left(columns[:, 0]), matrix(size).T @ columns[:, 0], atol=2e-5)


@pytest.mark.parametrize("size", SIZES)
def test_a_large_hadamard_matrix_is_computed_by_its_parts(size: int) -> None:
    factors = [len(factor) for factor in Rotation(size)._factors]
    assert np.prod(factors, initial=1) == size
    assert all(factor <= 128 for factor in factors if factor & (factor - 1) == 0)


@pytest.mark.parametrize("size", SIZES)
def test_lengths_and_angles_stay_what_they_are(size: int) -> None:
    rows = np.random.default_rng(0).standard_normal((4, size), dtype=np.float32)
    turned = Rotation(size).apply(rows)
    assert np.allclose(turned @ turned.T, rows @ rows.T, rtol=1e-4, atol=1e-3 * size**0.5)
