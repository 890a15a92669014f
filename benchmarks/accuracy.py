"""What a number format costs: perplexity on a fixed public text, and how often the most likely token is the same.

    python -m benchmarks.accuracy            # --quick: two pieces, nothing written

The text is the help topics that every Python carries (pydoc_data.topics), cut into pieces of 512 tokens. Float32 is the
yardstick. A piece is computed in two halves, so that the second reads the first from the cache. Writes
benchmarks/results/accuracy.json and the table of docs/performance.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.pages import fill
from benchmarks.results import write_rows
from paceline_server.config import parse
from paceline_server.engine.batch import SequenceSlice, StepBatch
from paceline_server.model.packing import pack
from paceline_server.model.startup import load

PIECE = 512
PIECES = 16
BLOCK = 16
QUICK_PIECES = 2


@dataclass(frozen=True, slots=True)
class Format:
    """How weights and KV cache are held: engine.dtype, engine.quantization, kv_cache.dtype."""

    dtype: str
    quantization: str | None = None
    kv_cache: str = "auto"


FORMATS = {
    "float32": Format("float32"),
    "bfloat16": Format("bfloat16"),
    "kv_int8": Format("float32", kv_cache="int8"),
    "int8": Format("bfloat16", "int8"),
    "int8_and_kv_int8": Format("bfloat16", "int8", "int8"),
}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of one format against float32.

    Attributes:
        perplexity_over_float32: 1 is no loss.
        equal_greedy_tokens: share of positions whose most likely next token is float32's.
    """

    perplexity_over_float32: float
    equal_greedy_tokens: float


def read_text(folder: Path) -> Tensor:
    """[PIECES, PIECE] token ids."""
    text = "\n".join(topics[key] for key in sorted(topics))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return torch.tensor(ids[: PIECES * PIECE]).view(PIECES, PIECE)


def logits_of(folder: Path, form: Format, pieces: Tensor) -> Iterator[Tensor]:
    """[PIECE, vocabulary] logits of each piece, by the engine's own runner."""
    config = parse(
        {
            "engine": {
                "model_path": str(folder),
                "device": "cpu",
                "dtype": form.dtype,
                "quantization": form.quantization,
            },
            "batching": {"max_batch_size": 1, "max_tokens_in_batch": PIECE},
            "kv_cache": {"block_size_tokens": BLOCK, "cpu_memory_gb": 0.25, "dtype": form.kv_cache},
        }
    )
    runner: Any = load(config, lambda _: None).runner
    half = PIECE // 2
    for piece in pieces:
        slices = [SequenceSlice(piece[at : at + half].tolist(), at, range(PIECE // BLOCK), None) for at in (0, half)]
        packed = [pack(StepBatch([one]), BLOCK) for one in slices]
        parts = [runner.model.logits(replace(one, logits_rows=np.arange(half))) for one in packed]
        yield torch.from_numpy(np.concatenate(parts))


def measure(folder: Path, form: Format, pieces: Tensor) -> tuple[float, Tensor]:
    """Mean negative log-likelihood of the next token, and the most likely one of every position."""
    loss, greedy = 0.0, []
    for piece, logits in zip(pieces, logits_of(folder, form, pieces), strict=True):
        loss += torch.nn.functional.cross_entropy(logits[:-1], piece[1:], reduction="sum").item()
        greedy.append(logits.argmax(-1))
    return loss / (len(pieces) * (PIECE - 1)), torch.stack(greedy)


def ratios(formats: dict[str, Accuracy]) -> dict[str, float]:
    """What is promised of int8; equal_greedy_tokens is the share under int8 weights and an int8 cache together."""
    return {
        "int8_perplexity_over_f32": formats["int8"].perplexity_over_float32,
        "kv_int8_perplexity_over_f32": formats["kv_int8"].perplexity_over_float32,
        "equal_greedy_tokens": formats["int8_and_kv_int8"].equal_greedy_tokens,
    }


def main(folder: Path, *, quick: bool) -> None:
    """Measure every format and write the result."""
    pieces = read_text(folder)[: QUICK_PIECES if quick else PIECES]
    base_loss, base_greedy = measure(folder, FORMATS["float32"], pieces)
    formats: dict[str, Accuracy] = {}
    for name, form in list(FORMATS.items())[1:]:
        loss, greedy = measure(folder, form, pieces)
        formats[name] = Accuracy(math.exp(loss - base_loss), float((greedy == base_greedy).float().mean()))
        print(name, formats[name], flush=True)
    if quick:
        return
    rows = [{"format": name, **asdict(accuracy)} for name, accuracy in formats.items()]
    workload = {"model": folder.name, "tokens": pieces.numel(), "float32_perplexity": math.exp(base_loss)}
    print(write_rows("accuracy", workload, rows, ratios(formats)), fill("accuracy"))


if __name__ == "__main__":
    model = Path.home() / ".cache/paceline/models/HuggingFaceTB/SmolLM2-135M-Instruct"
    main(model, quick="--quick" in sys.argv[1:])
