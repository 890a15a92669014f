"""A cluster that the user already has, named by PACELINE_TEST_KUBECONFIG; nothing is put on its nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cluster import cache
from cluster.access import Kubectl
from cluster.errors import Unavailable
from cluster.seam import Cluster, Helm

VARIABLE = "PACELINE_TEST_KUBECONFIG"


def named() -> Path | None:
    """Return the kubeconfig that the user names, if any.

    Raises:
        Unavailable: when it names no file.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return None
    path = Path(value).expanduser()
    if not path.is_file():
        raise Unavailable(f"{VARIABLE}={value} is not a file")
    return path


@contextlib.contextmanager
def running(kubeconfig: Path) -> Iterator[Cluster]:
    """Yield the user's cluster as it is.

    Raises:
        Unavailable: when kubectl or helm is missing.
        Failed: when the cluster does not answer, with what kubectl said.
    """
    programs = cache.require("kubectl", "helm")
    kubectl = Kubectl((str(programs / "kubectl"),), kubeconfig)
    kubectl("get", "--raw=/readyz", timeout=30)
    helm = Helm((str(programs / "helm"),), kubeconfig)
    yield Cluster(f"the cluster of {kubeconfig}", kubectl, helm, (), None, None)
