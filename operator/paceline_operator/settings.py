"""What `paceline operator` can be told, as one value. Built by the CLI from flags, read by `run.run_operator`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_SERVER_IMAGE: Final = "ghcr.io/paceline/server:0.1.0"


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Settings of one operator process. Each field is a flag of `paceline operator` with dashes for underscores.

    server_image: image of the pods of services that set no `spec.image`. A new default does not roll running services:
        each keeps the image of its revision until something else rolls its pods.
    namespaces: where to serve LLMServices; empty means in the whole cluster.
    metrics_port: port of /metrics (Prometheus text); 0 for any free one.
    health_port: port of /healthz (fails when the last full re-list is too old) and /readyz.
    lease_namespace, lease_name: the Lease that lets one of several operators act; the namespace is the operator's own.
    lease_seconds: how long the others wait for a holder that went silent; renewed at a third of it.
    identity: this process in the Lease, different for every replica (the pod's name); empty: host name and pid.
    resync_seconds: interval of the full re-list that repairs a lost watch.
    workers: services reconciled at the same time.
    kubeconfig: file to use; None: the pod's service account, else $KUBECONFIG, else ~/.kube/config.
    """

    server_image: str = DEFAULT_SERVER_IMAGE
    namespaces: tuple[str, ...] = ()
    metrics_port: int = 9090
    health_port: int = 8081
    lease_namespace: str = "paceline-system"
    lease_name: str = "paceline-operator"
    lease_seconds: float = 15.0
    identity: str = ""
    resync_seconds: float = 300.0
    workers: int = 4
    kubeconfig: str | None = None
