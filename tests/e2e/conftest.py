"""Fixtures of the end-to-end tests: what runs in the pods of the real node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import cache
from cluster.hostroot import HostRoot, write_image
from cluster.seam import Cluster

IMAGE = "paceline.test/hostroot:1"


@pytest.fixture(scope="session")
def host_python(node_cluster: Cluster) -> HostRoot:
    """Mounts of this machine's Python, source tree and model store, for pods of `host_image`."""
    if node_cluster.host_root is None:
        pytest.skip(f"the pods of {node_cluster.source} cannot see this machine's folders")
    return HostRoot.of_this_python(node_cluster.host_root, cache.model_store())


@pytest.fixture(scope="session")
def host_image(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of an image whose programs are this machine's, by the mounts of `host_python`."""
    node_cluster.import_image(write_image(IMAGE, tmp_path_factory.mktemp("image") / "hostroot.tar"))
    return IMAGE


@pytest.fixture
def namespace(node_cluster: Cluster) -> Iterator[str]:
    """A new namespace for one test."""
    with node_cluster.kubectl.namespace() as name:
        yield name
