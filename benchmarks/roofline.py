"""How near a run comes to what this machine can do at all: the least time that its arithmetic and its memory allow.

The bound takes the products of all tokens at the rate that one core reaches inside its cache, times the cores, and the
bytes that decoding has to read (weights once a step of a full batch, keys and values once a token) at the rate of
reading memory from front to back. The larger of the two is the bound (Williams, Waterman and Patterson, "Roofline",
2009). Nothing else is counted: not softmax, not norms, not the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.machine import cores
from benchmarks.workloads import Workload
from paceline_server.model.native import library

_FORMATS = {"float32": (0, 4.0), "bfloat16": (1, 2.0), "int8": (2, 1.0)}  # number in csrc/tile.h, bytes a weight
_READ_BYTES = 1 << 29
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Roof:
    """What the machine can do.

    Attributes:
        multiply_adds: per second, of all cores, by weight format.
        read_bytes: per second, of all cores.
    """

    multiply_adds: dict[str, float]
    read_bytes: float

    def describe(self) -> dict[str, Any]:
        """For the result file."""
        return asdict(self)


def measure() -> Roof:
    """Measure this machine, some seconds."""
    return Roof({name: len(cores()) * _product_rate(number) for name, (number, _) in _FORMATS.items()}, _read_rate())


def _product_rate(number: int) -> float:
    return _highest(lambda: float(library().call("product_rate", number)))


def _read_rate() -> float:
    data = torch.ones(_READ_BYTES // 4)

    def read() -> float:
        begin = perf_counter()
        data.sum()
        return _READ_BYTES / (perf_counter() - begin)

    return _highest(read)


def _highest(rate: Callable[[], float]) -> float:
    """The highest of the rates that are measured in `_SECONDS`: the machine slows down for moments."""
    end, best = perf_counter() + _SECONDS, 0.0
    while perf_counter() < end:
        best = max(best, rate())
    return best


def least_seconds(roof: Roof, model: Path, workload: Workload, clients: int, weights: str, kv_bytes: int = 2) -> float:
    """The least time in which a workload can be computed.

    Args:
        weights: float32, bfloat16 or int8.
        kv_bytes: of a number in the KV cache.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    per_layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner
    head = hidden * config["vocab_size"]
    computed = sum(one.prompt_tokens + one.max_tokens - 1 for one in workload.requests)
    arithmetic = computed * layers * per_layer + workload.output_tokens * head
    unsampled = sum(one.prompt_tokens - 1 for one in workload.requests)  # the last layer owes them keys and values
    arithmetic -= unsampled * (per_layer - 2 * hidden * keys)
    arithmetic += (
        2 * layers * queries * sum(_pairs(one.prompt_tokens + one.max_tokens - 1) for one in workload.requests)
    )
    read = workload.output_tokens / clients * (layers * per_layer + head) * _FORMATS[weights][1]
    context = sum(one.max_tokens * (one.prompt_tokens + one.max_tokens / 2) for one in workload.requests)
    read += context * 2 * layers * keys * kv_bytes
    return float(max(arithmetic / roof.multiply_adds[weights], read / roof.read_bytes))


def _pairs(length: int) -> int:
    """Query and key pairs of a sequence: each token attends to itself and to all before it."""
    return length * (length + 1) // 2
