"""Fixtures of every kind of test: clusters, the demo model, ports.

What this machine cannot provide skips its tests with the reason; what should work and does not fails them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import api_server as api_server_module
from cluster import cache
from cluster.api_server import ApiServer
from cluster.errors import Unavailable
from cluster.process import free_port as find_free_port

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@contextlib.contextmanager
def skipped_if_unavailable() -> Iterator[None]:
    """Turn a missing prerequisite into a skip; every other error stays one."""
    try:
        yield
    except Unavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real kube-apiserver with etcd and the controllers, for the whole session; no nodes."""
    state = tmp_path_factory.mktemp("api-server")
    with contextlib.ExitStack() as stack:
        with skipped_if_unavailable():
            server = stack.enter_context(api_server_module.running(state))
        yield server


@pytest.fixture(scope="session")
def smollm2_model() -> Path:
    """The folder of SmolLM2-135M-Instruct in the model store."""
    folder = cache.model_store() / SMOLLM2
    if not (folder / "config.json").exists():
        pytest.skip(f"{SMOLLM2} is not in the model store {cache.model_store()}: run `make model` once")
    return folder


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a TCP port of 127.0.0.1 that is free just now."""
    return find_free_port
