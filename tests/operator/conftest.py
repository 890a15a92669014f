"""Fixtures of the operator's tests against a real API server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import Adapter, Service, installed
from cluster.api_server import ApiServer
from operators import OperatorProcess, World

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


@pytest.fixture(scope="module")
def operator(api_server: ApiServer, crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """An operator for the whole cluster, for a module whose tests need no other."""
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    one = OperatorProcess(
        log, kubeconfig=str(api_server.kubeconfig), lease_namespace="default", lease_name=log.parent.name
    )
    yield one
    one.stop()


@pytest.fixture
def start_operator(
    api_server: ApiServer, crd: None, namespace: str, tmp_path: Path
) -> Iterator[Callable[..., OperatorProcess]]:
    """A function that starts an operator for the test's namespace: `start_operator("name", setting=…)`."""
    started: list[OperatorProcess] = []
    known = {"kubeconfig": str(api_server.kubeconfig), "namespaces": [namespace], "lease_namespace": namespace}

    def start(name: str = "operator", **settings: Any) -> OperatorProcess:
        started.append(OperatorProcess(tmp_path / f"{name}.log", **known | settings))
        return started[-1]

    yield start
    for one in reversed(started):
        one.stop()


@pytest.fixture
def world(api_server: ApiServer, namespace: str) -> World:
    """The test's namespace, as its users, its scheduler and its kubelet see it."""
    return World(api_server.kubectl, namespace)


@pytest.fixture(scope="module")
def adapter(
    own_api_server: ApiServer, helm_program: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Adapter]:
    """The adapter as the chart installs it, for the tests of one file: its API stays known to a server that had it."""
    with installed(own_api_server, helm_program, tmp_path_factory.mktemp("adapter")) as one:
        yield one


@pytest.fixture
def make_service(adapter: Adapter) -> Iterator[Callable[..., Service]]:
    """A function that creates an LLMService with one pod, for which this process answers."""
    made: list[Service] = []

    def make(name: str = "demo", **spec: Any) -> Service:
        made.append(Service(adapter.server, namespace, name, spec))
        made[-1].create()
        return made[-1]

    with adapter.server.namespace() as namespace:
        yield make
    for service in made:
        service.close()
