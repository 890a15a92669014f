"""The C++ kernels as Python sees them: ctypes mirrors of csrc/api.cpp, and handles that free themselves.

`attention.cpu`, `fused_decoder` and `native_sampler` call it. A call takes raw addresses of arrays and gives up the
interpreter lock while it runs; whoever calls keeps what it points at alive.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_server.errors import NativeUnavailable, OutOfMemory
from paceline_server.model.formats import Numbers
from paceline_server.model.native_build import best_instruction_set, find_or_build


def _int32s(names: str) -> list[tuple[str, Any]]:
    return [(name, c_int32) for name in names.split()]


def _floats(names: str) -> list[tuple[str, Any]]:
    return [(name, c_float) for name in names.split()]


class CacheShape(Structure):
    """csrc/cache.h."""

    _fields_ = _int32s("layers blocks block_size kv_heads head_dim format")


class StepShape(Structure):
    """csrc/attention.h."""

    _fields_ = [
        *[(name, c_int64) for name in ("tokens", "sequences", "table_width")],
        *[(name, c_void_p) for name in ("slots", "query_starts", "kv_lengths", "deterministic", "block_table")],
    ]


class ScoreRule(Structure):
    """csrc/attention.h."""

    _fields_ = [("scale", c_float), ("softcap", c_float), ("window", c_int32)]


class Source(Structure):
    """csrc/matrix.h."""

    _fields_ = [("data", c_void_p), ("bfloat16", c_int32)]


class DecoderShape(Structure):
    """csrc/decoder.h."""

    _fields_ = [
        *_int32s("hidden intermediate heads kv_heads head_dim rotary vocabulary norm_whole_rows gelu"),
        *_int32s("weight_format head_format down_factor"),
        *_floats("epsilon attention_scale attention_softcap embedding_scale residual_scale"),
        *_floats("logits_scale logits_softcap"),
    ]


class LayerSource(Structure):
    """csrc/decoder.h."""

    _fields_ = [
        *_int32s("window rotary_table"),
        *[
            (name, Source)
            for name in (
                "attention_norm attention_after_norm mlp_norm mlp_after_norm "
                "query key value output query_bias key_bias value_bias output_bias "
                "query_norm key_norm gate up down gate_bias up_bias down_bias"
            ).split()
        ],
    ]


class StepInput(Structure):
    """csrc/decoder.h."""

    _fields_ = [
        ("token_ids", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("logits_rows_count", c_int64),
        ("logits_rows", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "product_rate": (c_double, (c_int,)),
    "pool_new": (c_void_p, (c_int,)),
    "pool_free": (None, (c_void_p,)),
    "attention_new": (c_void_p, (c_void_p, POINTER(CacheShape))),
    "attention_free": (None, (c_void_p,)),
    "attention_block_bytes": (c_int64, (c_void_p,)),
    "attention_copy_block": (None, (c_void_p, c_int64, c_int64)),
    "attention_save_block": (None, (c_void_p, c_int64, c_void_p)),
    "attention_load_block": (None, (c_void_p, c_void_p, c_int64)),
    "attention_plan": (None, (c_void_p, POINTER(StepShape), c_int)),
    "attention_write": (None, (c_void_p, POINTER(StepShape), c_int, c_void_p, c_void_p)),
    "attention_forward": (None, (c_void_p, c_int, c_void_p, c_int, POINTER(ScoreRule), c_void_p)),
    "decoder_new": (c_void_p, (c_void_p, POINTER(DecoderShape), *[POINTER(Source)] * 4)),
    "decoder_free": (None, (c_void_p,)),
    "decoder_add_layer": (c_void_p, (c_void_p, POINTER(LayerSource))),
    "decoder_seconds": (None, (c_void_p, c_void_p)),
    "draw": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "decoder_step": (c_void_p, (c_void_p, c_void_p, POINTER(StepShape), POINTER(StepInput), c_void_p)),
}
"""Result and arguments of each function of csrc/api.cpp, without its prefix."""


class Library:
    """The functions of one compiled library, checked by their declared types.

    Raises:
        NativeUnavailable: it cannot be loaded here, such as one that was compiled for a newer C library.
    """

    def __init__(self, path: str) -> None:
        self._functions: dict[str, Any] = {}
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise NativeUnavailable(f"the CPU kernels cannot be loaded: {error}; remove {path}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = library[f"paceline_{name}"]
            function.restype = result
            function.argtypes = arguments
            self._functions[name] = function

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; structures are passed by reference."""
        return self._functions[name](*arguments)

    def require(self, name: str, *arguments: Any) -> None:
        """Call a function that returns null when memory is short.

        Raises:
            OutOfMemory: it did.
        """
        if not self.call(name, *arguments):
            raise OutOfMemory(f"the CPU kernels ran out of memory ({name})")

    def make(self, kind: str, *arguments: Any) -> Handle:
        """Make a `pool`, an `attention` or a `decoder`.

        Raises:
            OutOfMemory: the kernels could not get the memory for it.
        """
        address = self.call(f"{kind}_new", *arguments)
        if not address:
            raise OutOfMemory(f"there is not enough memory for the {kind} of the CPU kernels")
        return Handle(self, kind, address)


class Handle:
    """Something that the library made; it is freed with this object.

    Attributes:
        address: to pass on to the library.
    """

    def __init__(self, library: Library, kind: str, address: int) -> None:
        self.address = address
        weakref.finalize(self, library.call, f"{kind}_free", address)


@cache
def library() -> Library:
    """The library for this processor, compiled at the first call on a machine.

    Raises:
        NativeUnavailable: see `native_build.find_or_build` and `Library`.
    """
    return Library(str(find_or_build(best_instruction_set())))


class ThreadPool:
    """Threads of the kernels, the calling one included. What is made with it must not outlive it.

    Args:
        threads: at least 1.
        kernels: the library to run; None takes the one for this processor.

    Raises:
        NativeUnavailable: there is none.
    """

    def __init__(self, threads: int, kernels: Library | None = None) -> None:
        self.library = kernels or library()
        self.handle = self.library.make("pool", threads)


def source(numbers: Numbers | None) -> Source:
    """A weight as the kernels read it; nothing where there is none. The array must outlive the use."""
    if numbers is None:
        return Source(None, 0)
    assert numbers.flags.c_contiguous
    assert numbers.dtype in (np.float32, np.uint16)
    return Source(numbers.ctypes.data, int(numbers.dtype == np.uint16))


def address(array: NDArray[Any], dtype: type[np.generic] = np.int64) -> int:
    """Where a contiguous array's numbers are."""
    assert array.flags.c_contiguous
    assert array.dtype == dtype
    pointer: int = array.ctypes.data
    return pointer
