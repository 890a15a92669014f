"""Fixtures of the operator's tests against a real API server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.api_server import ApiServer
from operators import OperatorProcess

CRD = Path(__file__).parents[2] / "crds/llmservices.paceline.dev.yaml"


@pytest.fixture
def namespace(api_server: ApiServer) -> Iterator[str]:
    """A new namespace for one test."""
    with api_server.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def crd(api_server: ApiServer) -> None:
    """The LLMService CRD, installed."""
    api_server.kubectl("apply", "-f", str(CRD))
    api_server.kubectl("wait", "--for=condition=Established", "crd/llmservices.paceline.dev", "--timeout=30s")


@pytest.fixture
def start_operator(
    api_server: ApiServer, crd: None, namespace: str, tmp_path: Path
) -> Iterator[Callable[..., OperatorProcess]]:
    """A function that starts an operator for the test's namespace: `start_operator("name", setting=…)`."""
    started: list[OperatorProcess] = []

    def start(name: str = "operator", **settings: Any) -> OperatorProcess:
        started.append(OperatorProcess(api_server.kubeconfig, namespace, tmp_path / f"{name}.log", **settings))
        return started[-1]

    yield start
    for operator in reversed(started):
        operator.stop()
