"""Kubernetes quantities."""

from __future__ import annotations

from decimal import Decimal

import pytest

from paceline_operator.quantity import parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        (2, 2),
        ("500m", Decimal("0.5")),
        ("1.5", Decimal("1.5")),
        (".5", Decimal("0.5")),
        ("4Gi", 4 * 1024**3),
        ("4G", 4 * 10**9),
        ("1E", 10**18),
        ("1e3", 1000),
        ("1E3", 1000),
        ("12e-1", Decimal("1.2")),
        ("100n", Decimal("1e-7")),
    ],
)
def test_a_quantity_has_its_value(text: str | int, value: Decimal | int) -> None:
    """All suffixes and forms that the API server takes."""
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "4 GiB", "4GB", "four", "1e", "--1", "1.2.3", "Gi", "1Ki2"])
def test_anything_else_is_refused(text: str) -> None:
    """With what to write instead."""
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
