"""What helps to understand a failure on a cluster that will be gone in a moment. Used by `conftest`, `installation`."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.errors import Failed
from cluster.seam import Cluster

SYSTEM = "paceline-system"


def evidence(cluster: Cluster) -> str:
    """Return what kubectl says of objects and events, and the ends of the logs of operator, adapter and servers."""
    return "\n".join(_lines(cluster))


def _lines(cluster: Cluster) -> Iterator[str]:
    logs = ("logs", "--prefix", "--tail=60", "--ignore-errors", "--all-pods=true")
    yield _said(cluster, "get", "pods,llm,hpa", "-A", "-o", "wide")
    yield _said(cluster, "get", "events", "-A", "--sort-by=.lastTimestamp")
    yield _said(cluster, *logs, "-n", SYSTEM, "deployment/paceline-operator")
    yield _said(cluster, *logs, "-n", SYSTEM, "deployment/paceline-adapter")
    servers = "app.kubernetes.io/managed-by=paceline"
    columns = "jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{'\\n'}{end}"
    try:
        found = cluster.kubectl("get", "pods", "-A", "-l", servers, "-o", columns)
    except Failed:
        return
    for namespace, pod in (line.split() for line in found.splitlines()):
        yield _said(cluster, "logs", "--tail=40", "-n", namespace, pod)


def _said(cluster: Cluster, *command: str) -> str:
    """Return a kubectl command and its output, or its complaint."""
    try:
        output = cluster.kubectl(*command, timeout=30)
    except Failed as failure:
        output = str(failure)
    return f"$ kubectl {' '.join(command)}\n{output}"
