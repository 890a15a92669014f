"""Fixtures of the operator's tests against a real API server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.api_server import ApiServer


@pytest.fixture
def namespace(api_server: ApiServer) -> Iterator[str]:
    """A new namespace for one test."""
    with api_server.namespace() as name:
        yield name
