"""What `paceline adapter` can be told, as one value. Built by the CLI from flags, read by `server`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_operator.adapter.collector import INTERVAL_SECONDS


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings of one adapter process. Each field is a flag of `paceline adapter` with dashes for underscores.

    namespace: where the adapter's Service and Secret are; in a pod, its own.
    service_name: the Service that the APIService points to; the certificate is made for its DNS name.
    secret_name: the Secret that holds the certificate; it must exist, empty at first.
    host, port: where to listen with TLS; an empty host means all addresses, IPv4 and IPv6.
    interval_seconds: pause between two scrape rounds.
    kubeconfig: file to use; None: the pod's service account, else $KUBECONFIG, else ~/.kube/config.
    """

    namespace: str = "paceline-system"
    service_name: str = "paceline-adapter"
    secret_name: str = "paceline-adapter-tls"
    host: str = ""
    port: int = 6443
    interval_seconds: float = INTERVAL_SECONDS
    kubeconfig: str | None = None
