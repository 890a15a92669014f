"""The adapter's serving certificate is renewed under a live API server, and no question goes unanswered for it."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from adapters import HERE, METRICS, Adapter, Service, eventually
from cluster.access import KubectlError
from cluster.process import Process

END = b"-----END CERTIFICATE-----"
# An adapter that looks after its certificate often, and that SIGUSR1 tells that the time to renew it has come.
PROGRAM = """
import asyncio, signal, sys
from datetime import timedelta
from paceline_operator.adapter import certificates, server
from paceline_operator.adapter.settings import AdapterSettings
from paceline_operator.kube import KubeClient

usual, make = certificates.RENEW_BEFORE, certificates.make_certificate

def make_once(*args, **more):
    certificates.RENEW_BEFORE = usual
    return make(*args, **more)

def come(*_):
    certificates.RENEW_BEFORE = certificates.LIFETIME

async def main(kubeconfig, namespace, port):
    settings = AdapterSettings(
        namespace=namespace, host="127.0.0.1", port=int(port), interval_seconds=0.5, kubeconfig=kubeconfig
    )
    async with await KubeClient.connect(kubeconfig) as client, server.running_adapter(settings, client, 2.0):
        await asyncio.Event().wait()

certificates.make_certificate = make_once
signal.signal(signal.SIGUSR1, come)
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def renewing(adapter: Adapter, tmp_path: Path) -> Adapter:
    """The adapter, as a process that renews its certificate when it is told to."""
    adapter.process.stop()
    kubeconfig = next(word for word in adapter.command if word.startswith("--kubeconfig=")).split("=", 1)[1]
    command = [sys.executable, "-c", PROGRAM, kubeconfig, HERE, str(adapter.port)]
    adapter.process = Process("adapter", command, tmp_path / "log")

    def answers() -> bool:
        with contextlib.suppress(KubectlError):
            return bool(adapter.server.kubectl("get", "--raw", METRICS))
        return False

    eventually(answers)
    return adapter


def served(adapter: Adapter) -> str:
    """The certificate that a new connection gets."""
    return ssl.get_server_certificate(("127.0.0.1", adapter.port))


def test_a_renewed_certificate_is_served_and_trusted_without_a_restart_or_a_lost_scrape(
    renewing: Adapter, make_service: Callable[..., Service]
) -> None:
    """API servers and other replicas learn of it in their own time: the authority before it stays trusted."""
    service = make_service()
    service.servers[0].running = 5
    eventually(lambda: renewing.metric(service.namespace, "demo", "queue_depth") == "5")
    pid, asked = renewing.process.pid, 0
    for _ in range(3):
        certificate, bundle = served(renewing), renewing.bundle()
        os.kill(pid, signal.SIGUSR1)

        def follows(certificate: str = certificate, bundle: bytes = bundle) -> bool:
            nonlocal asked
            asked += 1
            assert renewing.metric(service.namespace, "demo", "queue_depth") == "5"
            return served(renewing) != certificate and renewing.bundle() != bundle

        eventually(follows)
        before, _, _ = bundle.partition(END)
        assert before + END in renewing.bundle()
    for _ in range(10):
        assert renewing.metric(service.namespace, "demo", "queue_depth") == "5"
    assert asked > 3
    assert (renewing.process.running(), renewing.process.pid) == (True, pid)
