"""Who holds what of this machine: the pods of one `paceline up`, and GPUs against the others of this user.

Owned by the kubelet, asked by its runners. A GPU is claimed by a lock on a file, which ends with the process that holds
it, however it ends. CPU and memory are not claimed: processes share them, GPUs they would fill for each other.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from decimal import Decimal
from io import BufferedWriter
from pathlib import Path
from urllib.parse import quote

from paceline_operator.cluster import Manifest
from paceline_operator.local.machine import Machine, Placement, Unschedulable, place


class Placements:
    """What the pods of this process hold.

    Args:
        machine: what there is.
        claims: folder of the GPUs' lock files, the same one for every `paceline up`.
    """

    def __init__(self, machine: Machine, claims: Path) -> None:
        self._machine = machine
        self._claims = claims
        self._held: dict[str, Placement] = {}  # by pod
        self._locks: dict[str, BufferedWriter] = {}  # by GPU

    def take(self, pod: Manifest) -> Placement | Unschedulable:
        """Find room for the pod, and keep it until `free`.

        Raises:
            ValueError: a quantity in the pod's resources cannot be read.
        """
        elsewhere: tuple[str, ...] = ()
        while True:
            others = Placement(Decimal(0), Decimal(0), elsewhere)
            answer = place(pod, self._machine, (*self._held.values(), others))
            if isinstance(answer, Unschedulable):
                return _explained(answer, elsewhere)
            busy = self._claim(answer.gpus)
            if not busy:
                self._held[pod["metadata"]["name"]] = answer
                return answer
            elsewhere += busy

    def free(self, pod_name: str) -> None:
        """Give up what a pod holds, if it holds anything."""
        placement = self._held.pop(pod_name, None)
        for gpu in placement.gpus if placement else ():
            self._locks.pop(gpu).close()

    def _claim(self, gpus: Iterable[str]) -> tuple[str, ...]:
        """Claim all of these GPUs, or none; returns those that another process holds."""
        locks = {gpu: _lock(self._claims / quote(gpu, safe="")) for gpu in gpus}
        busy = tuple(gpu for gpu, lock in locks.items() if lock is None)
        ours = {gpu: lock for gpu, lock in locks.items() if lock is not None}
        if not busy:
            self._locks |= ours
            return ()
        for lock in ours.values():
            lock.close()
        return busy


def _lock(path: Path) -> BufferedWriter | None:
    """The locked file; None where another process has it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = path.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _explained(answer: Unschedulable, elsewhere: tuple[str, ...]) -> Unschedulable:
    if not elsewhere:
        return answer
    return Unschedulable(f"another `paceline up` holds {', '.join(elsewhere)} ({answer.message})")
