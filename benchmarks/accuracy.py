"""What a number format costs: perplexity on a fixed public text, and how often the most likely token is the same.

    python -m benchmarks.accuracy

The text is the help topics that every Python carries (pydoc_data.topics), cut into pieces of 512 tokens. Float32 is the
yardstick. Writes benchmarks/results/accuracy.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.results import FOLDER
from paceline_server.config import parse
from paceline_server.engine.batch import SequenceSlice, StepBatch
from paceline_server.model.packing import pack
from paceline_server.model.startup import load

PIECE = 512
PIECES = 16
BLOCK = 16
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
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


def logits_of(folder: Path, engine: dict[str, Any], pieces: Tensor) -> Iterator[Tensor]:
    """[PIECE, vocabulary] logits of each piece, by the engine's own runner."""
    config = parse(
        {
            "engine": {"model_path": str(folder), "device": "cpu", **engine},
            "batching": {"max_batch_size": 1, "max_tokens_in_batch": PIECE},
            "kv_cache": {"block_size_tokens": BLOCK, "cpu_memory_gb": 0.25},
        }
    )
    runner: Any = load(config, lambda _: None).runner
    for piece in pieces:
        packed = pack(StepBatch([SequenceSlice(piece.tolist(), 0, range(PIECE // BLOCK), None)]), BLOCK)
        yield runner.model.logits(replace(packed, logits_rows=np.arange(PIECE)))


def measure(folder: Path, engine: dict[str, Any], pieces: Tensor) -> tuple[float, Tensor]:
    """Mean negative log-likelihood of the next token, and the most likely one of every position."""
    loss, greedy = 0.0, []
    for piece, logits in zip(pieces, logits_of(folder, engine, pieces), strict=True):
        loss += torch.nn.functional.cross_entropy(logits[:-1], piece[1:], reduction="sum").item()
        greedy.append(logits.argmax(-1))
    return loss / (PIECES * (PIECE - 1)), torch.stack(greedy)


def main(folder: Path) -> None:
    """Measure every format and write the result."""
    pieces = read_text(folder)
    base_loss, base_greedy = measure(folder, FORMATS["float32"], pieces)
    result: dict[str, Any] = {"model": folder.name, "tokens": pieces.numel(), "perplexity": math.exp(base_loss)}
    for name, engine in list(FORMATS.items())[1:]:
        loss, greedy = measure(folder, engine, pieces)
        accuracy = Accuracy(math.exp(loss - base_loss), float((greedy == base_greedy).float().mean()))
        result[name] = asdict(accuracy)
        print(name, accuracy, flush=True)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "accuracy.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path.home() / ".cache/paceline/models/HuggingFaceTB/SmolLM2-135M-Instruct")
