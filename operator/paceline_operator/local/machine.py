"""What this machine has, and which pod fits onto it: the scheduler of local mode.

`place` is pure. `placements` calls it for every pod before it starts, with what the pods that run hold.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from paceline_operator.cluster import Manifest
from paceline_operator.local import cgroup
from paceline_operator.quantity import parse_quantity

GPU = "nvidia.com/gpu"
_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA_SMI_SECONDS = 20.0  # the first call after boot initialises the driver
_WITHOUT_GPU = (
    "`paceline up --cpu` runs the model on the CPU, or set spec.resources to what there is: "
    "this machine has no NVIDIA GPU"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Capacity: cores, bytes, and the GPUs by the identifier that CUDA_VISIBLE_DEVICES takes."""

    cpus: Decimal | int
    memory: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """What a pod holds while it is on the machine."""

    cpu: Decimal  # cores
    memory: Decimal  # bytes
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unschedulable:
    """The pod does not fit now. `message` is in the words of the Kubernetes scheduler, and says what to do."""

    message: str


async def detect() -> Machine:
    """Look at this machine, or at what a container leaves us of it."""
    cores, quota = Decimal(len(os.sched_getaffinity(0))), cgroup.cpu_quota(_CGROUP)
    memory, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), cgroup.memory_limit(_CGROUP)
    return Machine(
        cpus=cores if quota is None else min(cores, quota),
        memory=memory if limit is None else min(memory, limit),
        gpus=await asyncio.to_thread(_gpus),
    )


def place(pod: Manifest, machine: Machine, held: Iterable[Placement]) -> Placement | Unschedulable:
    """Decide whether the pod's requests fit beside what others hold, and give it GPUs of its own.

    Raises:
        ValueError: a quantity in the pod's resources cannot be read.
    """
    requests = requests_of(pod)
    others = tuple(held)
    cpu, memory = requests.pop("cpu", Decimal(0)), requests.pop("memory", Decimal(0))
    taken = {gpu for placement in others for gpu in placement.gpus}
    free_gpus = tuple(gpu for gpu in machine.gpus if gpu not in taken)
    gpus = int(requests.pop(GPU, Decimal(0)))
    if gpus > len(free_gpus):
        return _insufficient(GPU, "" if machine.gpus else _WITHOUT_GPU)
    if cpu + sum(placement.cpu for placement in others) > machine.cpus:
        return _insufficient("cpu", f"the pod requests {cpu:f} cores, this machine has {machine.cpus}")
    if memory + sum(placement.memory for placement in others) > machine.memory:
        return _insufficient("memory", f"the pod requests {int(memory)} bytes, this machine has {machine.memory}")
    for resource, amount in requests.items():
        if amount > 0 and resource != "ephemeral-storage":
            return _insufficient(resource, "local mode offers cpu, memory and whole NVIDIA GPUs")
    return Placement(cpu, memory, free_gpus[:gpus])


def requests_of(pod: Manifest) -> dict[str, Decimal]:
    """Requests of all containers; a limit without a request is one, as the API server has it."""
    total: dict[str, Decimal] = {}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, quantity in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] = total.get(name, Decimal(0)) + parse_quantity(quantity)
    return total


def _insufficient(resource: str, advice: str) -> Unschedulable:
    """What to do comes first: the scheduler's own words mean something only to who knows Kubernetes."""
    words = f"0/1 nodes are available: 1 Insufficient {resource}."
    return Unschedulable(f"{advice} ({words})" if advice else words)


def _gpus() -> tuple[str, ...]:
    """GPUs that a process of ours may use: all, or those that CUDA_VISIBLE_DEVICES leaves."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [command, "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = tuple(line.strip() for line in answer.stdout.splitlines() if line.startswith("GPU-"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
