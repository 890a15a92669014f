"""An API server without nodes: etcd, kube-apiserver and kube-controller-manager on 127.0.0.1, for the operator's tests.

Everything that is not a container is real: defaulting and validation of the CRD, server-side apply, RBAC, garbage
collection by owner references, ReplicaSets, the HPA, aggregated APIs. Pods are made and stay Pending; a test that wants
one Ready patches its status. Started by the `api_server` fixture; needs neither root nor a container runtime.
"""

from __future__ import annotations

import contextlib
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cluster import cache, pki
from cluster.access import Identity, Kubectl, write_kubeconfig, write_token_file
from cluster.process import Process, all_stopped, free_port

HPA_SYNC = "1s"  # instead of 15 s: a test sees the next decision at once


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running API server and what a test needs to use it.

    An aggregated API (the metrics adapter) is reached through a Service of type ExternalName `localhost`.
    """

    url: str
    kubeconfig: Path
    bin: Path
    kubectl: Kubectl
    front_proxy_authority: Path  # signs the certificate that the API server shows to aggregated APIs
    processes: list[Process] = field(repr=False)

    def namespace(self, prefix: str = "test") -> contextlib.AbstractContextManager[str]:
        """Yield the name of a new namespace that is deleted afterwards."""
        return self.kubectl.namespace(prefix)

    def kubeconfig_for(self, user_token: str, path: Path) -> Path:
        """Write a kubeconfig for the bearer of a token, e.g. one that `kubectl create token` gave; returns `path`."""
        write_kubeconfig(path, self.url, self.kubeconfig.parent / "ca.crt", user_token)
        return path


@contextlib.contextmanager
def running(state: Path) -> Iterator[ApiServer]:
    """Yield an API server whose files are in `state`, an empty folder; on leaving, nothing is left running.

    Raises:
        Unavailable: where the programs are not built.
        Failed: when one of them does not come up, with the end of its log.
    """
    programs = cache.require("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
    admin = Identity.create("admin", "system:masters")
    _write_credentials(state, admin)
    processes: list[Process] = []
    with all_stopped(processes):
        etcd_url = _start_etcd(programs, state, processes)
        url = _start_api_server(programs, state, etcd_url, processes)
        kubeconfig = state / "kubeconfig"
        write_kubeconfig(kubeconfig, url, state / "ca.crt", admin.token)
        _start_controller_manager(programs, state, processes)
        kubectl = Kubectl((str(programs / "kubectl"),), kubeconfig)
        kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=30s")
        yield ApiServer(url, kubeconfig, programs, kubectl, state / "front-proxy-ca.crt", processes)


def _write_credentials(state: Path, admin: Identity) -> None:
    """Write serving certificate, front-proxy certificate, service account keys and tokens into `state`."""
    authority = pki.Authority.create("paceline-test")
    authority.write(state / "ca.crt")
    authority.issue(state / "apiserver", "kube-apiserver", hosts=["127.0.0.1", "localhost", "kubernetes.default.svc"])
    front_proxy = pki.Authority.create("paceline-test-front-proxy")
    front_proxy.write(state / "front-proxy-ca.crt")
    front_proxy.issue(state / "front-proxy", "front-proxy")
    pki.write_key_pair(state / "service-account")
    write_token_file(state / "tokens.csv", [admin])


def _start_etcd(programs: Path, state: Path, processes: list[Process]) -> str:
    client, peer = free_port(), free_port()
    etcd = Process(
        "etcd",
        [
            str(programs / "etcd"),
            f"--data-dir={state / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
            "--log-level=error",
        ],
        state / "etcd.log",
    )
    processes.append(etcd)
    etcd.wait_until(lambda: _answers(f"http://127.0.0.1:{client}/readyz"), seconds=30)
    return f"http://127.0.0.1:{client}"


def _start_api_server(programs: Path, state: Path, etcd_url: str, processes: list[Process]) -> str:
    port = free_port()
    server = Process(
        "kube-apiserver",
        [
            str(programs / "kube-apiserver"),
            f"--etcd-servers={etcd_url}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--endpoint-reconciler-type=none",  # a loopback address is no endpoint
            "--service-cluster-ip-range=10.0.0.0/16",
            f"--cert-dir={state}",
            f"--tls-cert-file={state / 'apiserver.crt'}",
            f"--tls-private-key-file={state / 'apiserver.key'}",
            f"--token-auth-file={state / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={state / 'service-account.pub'}",
            f"--service-account-signing-key-file={state / 'service-account.key'}",
            *front_proxy_flags(state),
        ],
        state / "kube-apiserver.log",
    )
    processes.append(server)
    url = f"https://127.0.0.1:{port}"
    trust = ssl.create_default_context(cafile=str(state / "ca.crt"))
    server.wait_until(lambda: _answers(f"{url}/readyz", trust), seconds=60)
    return url


def front_proxy_flags(pki_folder: Path) -> list[str]:
    """Return the API server's flags for aggregated APIs: how it says to them who the user is."""
    return [
        f"--requestheader-client-ca-file={pki_folder / 'front-proxy-ca.crt'}",
        f"--proxy-client-cert-file={pki_folder / 'front-proxy.crt'}",
        f"--proxy-client-key-file={pki_folder / 'front-proxy.key'}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
    ]


def _start_controller_manager(programs: Path, state: Path, processes: list[Process]) -> None:
    manager = Process(
        "kube-controller-manager",
        [
            str(programs / "kube-controller-manager"),
            f"--kubeconfig={state / 'kubeconfig'}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--root-ca-file={state / 'ca.crt'}",
            f"--service-account-private-key-file={state / 'service-account.key'}",
            "--use-service-account-credentials",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            f"--horizontal-pod-autoscaler-sync-period={HPA_SYNC}",
        ],
        state / "kube-controller-manager.log",
    )
    processes.append(manager)


def _answers(url: str, trust: ssl.SSLContext | None = None) -> bool:
    """Whether a GET of this URL succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2, context=trust) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
