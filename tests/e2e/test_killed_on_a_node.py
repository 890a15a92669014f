"""A server that somebody kills, and one that a kubelet's probe kills: both end with 137, and the status tells which."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster.hostroot import HostRoot
from cluster.seam import Cluster
from e2e.installation import Images
from e2e.live_service import LiveService, eventually

pytestmark = pytest.mark.timeout(600)


def test_a_kill_by_somebody_is_told_from_a_kill_by_a_probe(
    paceline: Cluster, images: Images, namespace: str, host_python: HostRoot
) -> None:
    """`host_python` says that the node's processes are this machine's."""
    service = LiveService.sample(paceline, namespace, images.spec).changed(drainSeconds=0)
    service.apply()
    service.wait("condition=Ready", 180)
    os.kill(server_process(service), signal.SIGKILL)
    eventually(lambda: service.condition("Degraded").get("reason") == "Killed", 120)
    assert "SIGKILL" in service.condition("Degraded")["message"]
    eventually(lambda: service.condition("Degraded").get("reason") == "AsExpected", 180)

    os.kill(server_process(service), signal.SIGSTOP)  # heeds no SIGTERM either
    eventually(lambda: service.condition("Degraded").get("reason") == "Restarted", 180)
    (pod,) = service.pods()
    assert pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 137
    service.wait("condition=Ready", 180)


def server_process(service: LiveService) -> int:
    """The first process of the server's container, as this machine numbers it."""
    (pod,) = service.pods()
    uid = pod["metadata"]["uid"]
    (found,) = (int(folder.name) for folder in Path("/proc").glob("[0-9]*") if is_server(folder, uid))
    return found


def is_server(process: Path, uid: str) -> bool:
    """Whether a process is the first one of the server in the pod with this uid."""
    try:
        group, command, status = ((process / file).read_text() for file in ("cgroup", "cmdline", "status"))
    except OSError:  # it has ended
        return False
    numbers = next((line.split() for line in status.splitlines() if line.startswith("NSpid:")), [])
    return uid in group.replace("_", "-") and "paceline-server" in command and numbers[-1:] == ["1"]
