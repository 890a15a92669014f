"""A model's safetensors files as they lie on disk: mapped, never copied whole, and read without torch.

`weights` takes tensors out of them by name. The library `safetensors` checks each file before anything is believed;
the places of the tensors come from the file's header (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
from safetensors import SafetensorError, safe_open

from paceline_server.errors import ModelNotFound, ModelUnsupported, OutOfMemory
from paceline_server.model.cache import GIB
from paceline_server.model.formats import ITEM_BYTES, Numbers, narrowed
from paceline_server.model.store import weight_files

_STORED = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "F64": np.float64}


@dataclass(frozen=True, slots=True)
class _Tensor:
    kind: str
    shape: tuple[int, ...]
    begin: int
    memory: mmap.mmap


class Checkpoint:
    """All tensors of a folder, by name. A context manager: what `read` gave must not be used after its end.

    Raises:
        ModelNotFound: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[mmap.mmap] = []
        self._tensors: dict[str, _Tensor] = {}
        for name in weight_files(folder):
            self._add(folder / name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for memory in self._files:
            memory.madvise(mmap.MADV_DONTNEED)  # out of our sight; the system keeps it as long as it likes
        self._tensors.clear()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return self._tensors[name].shape

    def bytes_in(self, dtype: str) -> int:
        """Memory that all tensors take in a number format."""
        return sum(prod(tensor.shape) for tensor in self._tensors.values()) * ITEM_BYTES[dtype]

    def read(self, name: str, dtype: str) -> Numbers:
        """A tensor that is there, for an engine that computes in `dtype`, float32 or bfloat16.

        What is stored in bfloat16 stays so: float32 holds the same numbers. It lies in the file where it can.

        Raises:
            ModelUnsupported: it is stored in a format that no weights have.
        """
        tensor = self._tensors[name]
        if tensor.kind not in _STORED:
            raise ModelUnsupported(f"the weights of {self.folder} are {tensor.kind} ({name}); use the original ones")
        stored = np.frombuffer(tensor.memory, _STORED[tensor.kind], prod(tensor.shape), tensor.begin)
        if tensor.kind == "BF16":
            return stored.view(np.uint16).reshape(tensor.shape)
        floats = stored.astype(np.float32, copy=False).reshape(tensor.shape)
        return floats if dtype == "float32" else narrowed(floats)

    def _add(self, path: Path) -> None:
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise ModelNotFound(f"{path} is damaged ({error}); remove it and fetch the model again") from None
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(memory[:8], "little")
        header = json.loads(memory[8 : 8 + size])
        header.pop("__metadata__", None)
        self._files.append(memory)
        for name, entry in header.items():
            begin = 8 + size + int(entry["data_offsets"][0])
            self._tensors[name] = _Tensor(str(entry["dtype"]), tuple(entry["shape"]), begin, memory)


def require_room(needed: int, dtype: str, available: int) -> None:
    """Refuse weights that memory does not hold.

    Args:
        needed: bytes that they take in `dtype`.
        available: bytes that may be taken.

    Raises:
        OutOfMemory: they do not fit.
    """
    if needed > available:
        raise OutOfMemory(
            f"the weights take {needed / GIB:.2f} GiB as {dtype}, and {available / GIB:.2f} GiB are free; "
            "raise the memory limit or set engine.dtype to bfloat16"
        )
