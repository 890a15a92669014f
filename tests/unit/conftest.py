"""What the tests of the gateway share."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_server.testing import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a tiny model, without weights."""
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path
