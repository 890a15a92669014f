"""Fixtures of every kind of test: clusters, the demo model, ports.

What this machine cannot provide skips its tests with the reason; what should work and does not fails them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import api_server as api_servers
from cluster import cache, sources
from cluster.api_server import ApiServer
from cluster.errors import Unavailable
from cluster.process import free_port as find_free_port
from cluster.seam import Cluster
from hypothesis import settings

# As the server does for its engine: compute threads that spin while they wait would starve the servers beside them.
# Set before the first test module imports torch, which reads it once.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The Triton kernels run in its interpreter, which has to be said before anything imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

# An example's time says how busy the machine is.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@contextlib.contextmanager
def skipped_if_unavailable() -> Iterator[None]:
    """Turn a missing prerequisite into a skip; every other error stays one.

    With PACELINE_TEST_REQUIRE_ALL set, as in CI, a missing prerequisite is an error too.
    """
    try:
        yield
    except Unavailable as missing:
        if os.environ.get("PACELINE_TEST_REQUIRE_ALL"):
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real kube-apiserver with etcd and the controllers, for the whole session; no nodes."""
    state = tmp_path_factory.mktemp("api-server")
    with contextlib.ExitStack() as stack:
        with skipped_if_unavailable():
            server = stack.enter_context(api_servers.running(state))
        yield server


@pytest.fixture(scope="module")
def own_api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server for one module alone, for tests of what exists once in a cluster."""
    state = tmp_path_factory.mktemp("own-api-server")
    with contextlib.ExitStack() as stack:
        with skipped_if_unavailable():
            server = stack.enter_context(api_servers.running(state))
        yield server


@pytest.fixture(scope="session")
def helm_program() -> str:
    """The path of helm."""
    with skipped_if_unavailable():
        return str(cache.require("helm") / "helm")


@pytest.fixture(scope="session")
def node_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a real node, for the whole session: the user's, kind's, or one of our own."""
    state = tmp_path_factory.mktemp("node")
    with contextlib.ExitStack() as stack:
        with skipped_if_unavailable():
            cluster = stack.enter_context(sources.running(state))
        yield cluster


@pytest.fixture(scope="session")
def smollm2_model() -> Path:
    """The folder of SmolLM2-135M-Instruct in the model store."""
    return stored_model(SMOLLM2)


@pytest.fixture(scope="session")
def minilm_model() -> Path:
    """The folder of all-MiniLM-L6-v2 in the model store."""
    return stored_model(MINILM)


def stored_model(name: str) -> Path:
    """The folder of a model in the model store; without it the test is skipped."""
    folder = cache.model_store() / name
    with skipped_if_unavailable():
        if not (folder / "config.json").exists():
            raise Unavailable(f"{name} is not in the model store {cache.model_store()}: run `make model` once")
    return folder


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a TCP port of 127.0.0.1 that is free just now."""
    return find_free_port
