"""The command lines and credentials of a control plane, alike for an API server alone and for a whole node.

Pure but for the files of keys that `write_credentials` makes. Used by `api_server` and `node`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import pki
from cluster.access import Identity, write_token_file


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Where a control plane's programs, files and addresses are."""

    programs: Path
    state: Path  # keys, certificates, tokens, kubeconfig, etcd's data
    address: str  # of the API server; etcd listens on 127.0.0.1 only
    port: int
    etcd_port: int
    etcd_peer_port: int

    @property
    def url(self) -> str:
        """The API server's address for its clients."""
        return f"https://{self.address}:{self.port}"

    @property
    def etcd_url(self) -> str:
        """Etcd's address for its clients."""
        return f"http://127.0.0.1:{self.etcd_port}"

    @property
    def authority(self) -> Path:
        """The certificate that signs the API server's."""
        return self.state / "ca.crt"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's access."""
        return self.state / "kubeconfig"

    def write_credentials(self, hosts: Sequence[str], identities: Sequence[Identity]) -> None:
        """Write every key, certificate and token that the programs read.

        `hosts` are the names and addresses of the API server, beside its own address.
        """
        authority = pki.Authority.create("paceline-test")
        authority.write(self.authority)
        authority.issue(self.state / "apiserver", "kube-apiserver", hosts=[self.address, *hosts])
        authority.issue(self.state / "kubelet-client", "kube-apiserver", group="system:masters")
        front_proxy = pki.Authority.create("paceline-test-front-proxy")
        front_proxy.write(self.state / "front-proxy-ca.crt")
        front_proxy.issue(self.state / "front-proxy", "front-proxy")
        pki.write_key_pair(self.state / "service-account")
        write_token_file(self.state / "tokens.csv", identities)

    def etcd(self) -> list[str]:
        """Return etcd's command line: durable for as long as a test needs it to be."""
        peer = f"http://127.0.0.1:{self.etcd_peer_port}"
        return [
            str(self.programs / "etcd"),
            f"--data-dir={self.state / 'etcd'}",
            f"--listen-client-urls={self.etcd_url}",
            f"--advertise-client-urls={self.etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=error",
        ]

    def api_server(self, *extra: str) -> list[str]:
        """Return the API server's command line; `extra` are flags that only one kind of cluster has."""
        state = self.state
        return [
            str(self.programs / "kube-apiserver"),
            f"--etcd-servers={self.etcd_url}",
            f"--bind-address={self.address}",
            f"--secure-port={self.port}",
            f"--cert-dir={state}",
            f"--tls-cert-file={state / 'apiserver.crt'}",
            f"--tls-private-key-file={state / 'apiserver.key'}",
            f"--client-ca-file={self.authority}",
            f"--token-auth-file={state / 'tokens.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={state / 'service-account.pub'}",
            f"--service-account-signing-key-file={state / 'service-account.key'}",
            # how it tells an aggregated API (the metrics adapter) who the user is
            f"--requestheader-client-ca-file={state / 'front-proxy-ca.crt'}",
            f"--proxy-client-cert-file={state / 'front-proxy.crt'}",
            f"--proxy-client-key-file={state / 'front-proxy.key'}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            *extra,
        ]

    def controller_manager(self, *extra: str) -> list[str]:
        """Return the controller manager's command line, with the HPA looking every second instead of every 15."""
        return [
            str(self.programs / "kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--root-ca-file={self.authority}",
            f"--service-account-private-key-file={self.state / 'service-account.key'}",
            "--use-service-account-credentials",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
            *extra,
        ]
