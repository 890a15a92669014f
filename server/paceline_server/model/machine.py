"""What this machine gives: device, number format, compute threads, memory. Called by `startup.load`."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path

from paceline_server.errors import NoGPU
from paceline_server.model import cgroup

_CGROUP = Path("/sys/fs/cgroup")
_DEVICES = Path("/dev")
_GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")
"""Device files of NVIDIA's driver, of the one inside WSL, and of AMD's, which torch calls cuda too."""
_MEMINFO = Path("/proc/meminfo")


def choose_device(wanted: str) -> str:
    """The device for engine.device, cpu or cuda; auto is cuda where it can be.

    Raises:
        NoGPU: cuda is wanted and none is usable.
    """
    if wanted == "cpu" or (wanted == "auto" and not _has_gpu()):
        return "cpu"
    torch = importlib.import_module("torch")  # it takes seconds, and is for this alone where the kernels serve
    usable = bool(torch.cuda.is_available())
    if wanted == "cuda" and not usable:
        build = "" if torch.version.cuda else "; this torch is built without CUDA"
        raise NoGPU(
            f"engine.device is cuda, but no GPU is usable here{build}. "
            "Ask for one (resources.limits nvidia.com/gpu), or set engine.device to cpu"
        )
    return "cuda" if usable else "cpu"


def choose_dtype(wanted: str, checkpoint: str | None, device: str) -> str:
    """The format for engine.dtype; auto is the checkpoint's on a GPU and float32 on a CPU."""
    if wanted != "auto":
        return wanted
    return "float32" if device == "cpu" else (checkpoint or "bfloat16")


def choose_kv_dtype(wanted: str, dtype: str, quantization: str | None) -> str:
    """The format of keys and values for kv_cache.dtype, where the engine computes in `dtype`."""
    if wanted != "auto":
        return wanted
    return dtype if quantization is None else "bfloat16"


def cores_given() -> int:
    """Cores that this process may use: its affinity mask, within the container's CPU quota.

    A pod limited to 2 CPUs on a node of 64 sees all 64; with as many threads it would be throttled most of the time.
    """
    cores = len(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota(_CGROUP)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def available_memory() -> int:
    """Bytes that this process can still take: what the machine has free, within the container's limit."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    left = cgroup.memory_left(_CGROUP)
    return free if left is None else min(free, left)


def _has_gpu() -> bool:
    return any(any(_DEVICES.glob(pattern)) for pattern in _GPU_DEVICES)
