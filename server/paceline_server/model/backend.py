"""How a model is computed: fused into the CPU kernels, which is done here, or through transformers.

`startup` chooses before it reads the weights, because the choice can be refused, and builds the back end after. Where
the kernels compute, torch and transformers are never imported: that is most of the time of a start, and much memory.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline_server.config import EngineConfig, ServerConfig
from paceline_server.errors import InvalidConfiguration, NativeUnavailable
from paceline_server.model import native
from paceline_server.model.attention.cpu import CpuAttention
from paceline_server.model.cache import KVGeometry
from paceline_server.model.checkpoint import Checkpoint, require_room
from paceline_server.model.fused_decoder import FusedDecoder, FusedModel
from paceline_server.model.fused_layers import obstacle_to_fusing
from paceline_server.model.machine import cores_given
from paceline_server.model.runner import StepModel

log = logging.getLogger("paceline.model")


@dataclass(frozen=True, slots=True)
class Choice:
    """A back end.

    Attributes:
        name: `cpu`, `triton` or `reference`.
        drawback: why a slower one is taken than the device's own, and what to do, in one line, for everybody who asks:
            what a compiler says in more of them has the log alone. None where that is the one.
    """

    name: str
    drawback: str | None = None


class Backend(Protocol):
    """A loaded model without a KV cache.

    Attributes:
        out_of_memory: what is raised where a step does not fit, besides OutOfMemory.
    """

    out_of_memory: tuple[type[Exception], ...]

    @property
    def reserved_bytes(self) -> int:
        """Device memory that the KV cache must leave to what comes later."""
        ...

    def block_bytes(self, geometry: KVGeometry) -> int:
        """Bytes that one block will take."""
        ...

    def on_cache(self, geometry: KVGeometry, num_blocks: int, host_bytes: int = 0) -> StepModel:
        """Allocate a KV cache and join it to the model.

        Args:
            host_bytes: of host memory for slots that blocks can be moved to.

        Raises:
            OutOfMemory: the device has less than it said.
        """
        ...

    def release_cache(self) -> None:
        """Let go of the cache of the last `on_cache`."""
        ...


class CpuBackend:
    """A model fused into the C++ kernels. See `Backend`.

    Args:
        decoder: its weights, in the kernels' own layout.
        pool: with which it was made.
    """

    out_of_memory: tuple[type[Exception], ...] = ()

    def __init__(self, decoder: FusedDecoder, pool: native.ThreadPool) -> None:
        self._decoder = decoder
        self._pool = pool

    @classmethod
    def load(
        cls, folder: Path, model: Mapping[str, Any], dtype: str, available: int, config: ServerConfig
    ) -> CpuBackend:
        """Read and pack the weights.

        Args:
            folder: the model's.
            model: its complete configuration, see `config_file`.
            dtype: of the weights in memory.
            available: bytes of memory that may be taken.
            config: of the whole server.

        Raises:
            OutOfMemory: the weights do not fit.
            ModelNotFound: a file is damaged.
            ModelUnsupported: files and configuration do not go together.
        """
        pool = native.ThreadPool(config.engine.threads or cores_given())
        with Checkpoint(folder) as checkpoint:
            require_room(checkpoint.bytes_in(dtype), dtype, available)
            int8 = config.engine.quantization == "int8"
            return cls(FusedDecoder(checkpoint, model, dtype, pool, int8=int8), pool)

    @property
    def reserved_bytes(self) -> int:
        """None: nothing is captured."""
        return 0

    def block_bytes(self, geometry: KVGeometry) -> int:
        """Of a cache of one block: only the kernels know how they pad."""
        return CpuAttention(geometry, 1, self._pool).block_bytes

    def on_cache(self, geometry: KVGeometry, num_blocks: int, host_bytes: int = 0) -> StepModel:
        """Allocate a KV cache in the kernels' layout."""
        return FusedModel(self._decoder, CpuAttention(geometry, num_blocks, self._pool, host_bytes))

    def release_cache(self) -> None:
        """Nothing holds on to it but the model that `on_cache` returned."""


def choose_backend(engine: EngineConfig, config: Mapping[str, Any], dtype: str, kv_dtype: str, device: str) -> Choice:
    """The back end for engine.attention_backend.

    auto takes cpu on a CPU and triton on a GPU where they can, and says why where they cannot.

    Args:
        engine: of the configuration.
        config: the model's, complete.
        dtype: of the weights, or what they are quantized from.
        kv_dtype: of keys and values.
        device: where they go.

    Raises:
        InvalidConfiguration: what is asked for does not go with the model, the number format or the device.
        NativeUnavailable: the CPU kernels are asked for, and they are not compiled and cannot be.
    """
    wanted = engine.attention_backend
    own_kv_dtype = kv_dtype if kv_dtype != dtype else None
    for key, value in (("engine.quantization", engine.quantization), ("kv_cache.dtype", own_kv_dtype)):
        if value is None:
            continue
        if wanted in ("reference", "triton"):
            raise InvalidConfiguration(f"{key}: {value} is not done by engine.attention_backend {wanted}; leave it out")
        _require_kernels(f"{key}: {value}", config, dtype, device)
        wanted = "cpu"
    if wanted == "cpu":
        _require_kernels("engine.attention_backend: cpu", config, dtype, device)
    elif wanted == "triton" and (obstacle := _triton_obstacle(device)) is not None:
        raise InvalidConfiguration(f"engine.attention_backend: triton {obstacle}")
    return _best_backend(config, dtype, device) if wanted == "auto" else Choice(wanted)


def _require_kernels(asked: str, config: Mapping[str, Any], dtype: str, device: str) -> None:
    if (obstacle := _obstacle(config, dtype, device)) is not None:
        raise InvalidConfiguration(f"{asked} {obstacle}")
    native.library()


def _best_backend(config: Mapping[str, Any], dtype: str, device: str) -> Choice:
    best = "cpu" if device == "cpu" else "triton"
    obstacle = _obstacle(config, dtype, device) if best == "cpu" else _triton_obstacle(device)
    if obstacle is None and best == "cpu":
        try:
            native.library()
        except NativeUnavailable as error:
            obstacle = f"cannot be had: {error}"
    if obstacle is None:
        return Choice(best)
    drawback = f"serving with the slower back end reference, since engine.attention_backend {best} {obstacle}"
    log.warning("%s", drawback)
    return Choice("reference", drawback.splitlines()[0])


def _triton_obstacle(device: str) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not interpreted:
        return f"needs a GPU (engine.device), not {device}"
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which builds of torch for CUDA bring along"
    if not interpreted and not _has_c_compiler():
        return "needs a C compiler for the launcher of its kernels: install gcc, or name one in CC"
    return None


def _has_c_compiler() -> bool:
    """Whether Triton will find one. Source: `_find_compiler` of triton/runtime/build.py."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def _obstacle(config: Mapping[str, Any], dtype: str, device: str) -> str | None:
    if device != "cpu":
        return f"needs engine.device cpu, not {device}"
    if dtype not in ("float32", "bfloat16"):
        return f"needs engine.dtype float32 or bfloat16, not {dtype}; set one of them"
    return obstacle_to_fusing(config)
