"""Chooses where the tests' cluster comes from: the user's kubeconfig, else kind, else a node of our own.

Used by the fixture `node_cluster` and by `python -m cluster prepare`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cluster import build, components, existing, kind, node, packages
from cluster.errors import Unavailable
from cluster.seam import Cluster


def prepare() -> None:
    """Build and install what `running` will need on this machine, and the programs of the API server alone.

    Raises:
        Unavailable: when this machine can have no cluster with nodes, once the API server's programs are there.
        Failed: when a build or an installation fails.
    """
    build.build(components.ALWAYS)
    if not existing.named() and not _engine_runs():
        _require_own_node()
        build.build(components.NODE)
        packages.install()


@contextlib.contextmanager
def running(state: Path) -> Iterator[Cluster]:
    """Yield a cluster; what it needs on this machine is in `state`, an empty folder.

    Raises:
        Unavailable: when this machine can have none; says what would help.
        Failed: when it should have come up and did not.
    """
    if kubeconfig := existing.named():
        source = existing.running(kubeconfig)
    elif _engine_runs():
        source = kind.running(state)
    else:
        _require_own_node()
        source = node.running(state)
    with source as cluster:
        yield cluster


def _engine_runs() -> bool:
    try:
        kind.require_engine()
    except Unavailable:
        return False
    return True


def _require_own_node() -> None:
    try:
        node.require_machine()
    except Unavailable as reason:
        choices = f"name a kubeconfig in {existing.VARIABLE}, or start Docker for kind"
        raise Unavailable(f"no cluster with nodes: {reason}; {choices}") from reason
