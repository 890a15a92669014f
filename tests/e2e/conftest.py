"""Fixtures of the end-to-end tests: the chart on a real node, and what helps to understand a failure."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
from cluster.errors import Unavailable
from cluster.hostroot import HostRoot, write_image
from cluster.seam import Cluster
from e2e.evidence import evidence
from e2e.installation import DemoModel, Images, archives_of_the_user, install, system_namespace

IMAGE = "paceline.test/hostroot:1"


@pytest.fixture(scope="session")
def host_python(node_cluster: Cluster) -> HostRoot:
    """Mounts of this machine's Python and source tree, for pods of `host_image`."""
    if node_cluster.host_root is None:
        pytest.skip(f"the pods of {node_cluster.source} cannot see this machine's folders")
    return HostRoot.of_this_python(node_cluster.host_root)


@pytest.fixture(scope="session")
def host_image(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of an image whose programs are this machine's, by the mounts of `host_python`."""
    node_cluster.import_image(write_image(IMAGE, tmp_path_factory.mktemp("image") / "hostroot.tar"))
    return IMAGE


@pytest.fixture(scope="session")
def images(node_cluster: Cluster, request: pytest.FixtureRequest) -> Images:
    """The images of operator and server that the environment names, or what takes their place."""
    host_root = node_cluster.host_root
    model = DemoModel.on_node(host_root, request.getfixturevalue("smollm2_model")) if host_root else None
    try:
        named = Images.named_by_the_user(model)
    except Unavailable as reason:
        if model is None:
            pytest.skip(str(reason))
        host, image = (request.getfixturevalue(name) for name in ("host_python", "host_image"))
        return Images.of_this_machine(host, image, model)
    for archive in archives_of_the_user():
        node_cluster.import_image(archive)
    return named


@pytest.fixture(scope="module")
def paceline(node_cluster: Cluster, images: Images) -> Iterator[Cluster]:
    """The cluster with the chart installed, for the tests of one file."""
    with system_namespace(node_cluster):
        install(node_cluster, images)
        yield node_cluster


@pytest.fixture
def namespace(node_cluster: Cluster) -> Iterator[str]:
    """A new namespace for one test."""
    with node_cluster.kubectl.namespace() as name:
        yield name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Put the state of the cluster and the operator's log beside the traceback of a failed test."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("node_cluster")
    if report.failed and isinstance(cluster, Cluster):
        report.sections.append(("cluster", evidence(cluster)))
    return report
