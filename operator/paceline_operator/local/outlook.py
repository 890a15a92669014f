"""Whether a service that is not ready may become so by waiting. Pure; asked by `up` where somebody waits for it."""

from __future__ import annotations

from paceline_operator.cluster import Manifest
from paceline_operator.local.progress import condition
from paceline_operator.local.state import Snapshot

_EXIT_CONFIGURATION = 78  # the server's exit code for what a restart does not mend
_PATIENT = ("ContainerCreating", "PodInitializing")  # waiting reasons that pass by themselves


def hopeless(snapshot: Snapshot) -> str | None:
    """Why waiting would not help: nothing fits, a source is missing, or the server keeps ending. None while it may."""
    degraded = condition(snapshot, "Degraded")
    if degraded.get("status") != "True":
        return None
    if degraded["reason"] in ("InvalidSpec", "FailedMount") or any(_is_stuck(pod) for pod in snapshot.pods):
        return f"{degraded['reason']}: {degraded['message']}"
    return None


def _is_stuck(pod: Manifest) -> bool:
    status = pod.get("status", {})
    scheduled = all(
        found["status"] == "True" for found in status.get("conditions", ()) if found["type"] == "PodScheduled"
    )
    return not scheduled or any(_is_stuck_container(container) for container in status.get("containerStatuses", ()))


def _is_stuck_container(container: Manifest) -> bool:
    if container["state"].get("waiting", {}).get("reason", _PATIENT[0]) not in _PATIENT:
        return True
    ends = (container["state"].get("terminated", {}), container["lastState"].get("terminated", {}))
    return any(end.get("exitCode") == _EXIT_CONFIGURATION for end in ends)
