"""Turns a GGUF file into a folder that the server loads: safetensors weights, tokenizer and chat template.

    python -m paceline_server.convert MODEL.gguf FOLDER

`scripts/demo_model.py` calls it; so may anyone whose model exists only as a GGUF file. Needs the `gguf` extra.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from paceline_server.errors import InvalidConfiguration, ModelNotFound, ModelUnsupported, PacelineError
from paceline_server.scratch import scratch_folder, unwind_on_sigterm

_PLAIN_BYTE_LEVEL = {"gpt-2", "default"}
"""GGUF pre-tokenizer names that mean GPT-2's own split, which is what transformers falls back to."""

_DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
"""GGUF pre-tokenizer names that mean: every digit alone, then GPT-2's split (llama.cpp, src/llama-vocab.cpp)."""


def convert_gguf(source: Path, destination: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a GGUF file's model as a transformers folder, which appears only when it is complete.

    Quantised weights are expanded. They are saved as bfloat16 by default, which is what most models are published in:
    its rounding is far below the error of a block format of 4 or 8 bits, and the folder is half the size of float32's.

    Raises:
        ModelNotFound: no such file, or not a GGUF file.
        ModelUnsupported: an architecture or a tokenizer that cannot be converted faithfully.
        InvalidConfiguration: the destination is there already.
    """
    if not source.is_file():
        raise ModelNotFound(f"there is no file {source}")
    if destination.is_dir() and any(destination.iterdir()):
        raise InvalidConfiguration(f"{destination} is not empty; remove it first or name another folder")
    tokenizer = _tokenizer(source)
    with scratch_folder(destination.parent, f".{destination.name}.converting-") as partial:
        model = _model(source, dtype)
        model.save_pretrained(partial)
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(partial)
        _make_readable(partial)
        partial.replace(destination)


def _model(source: Path, dtype: torch.dtype) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
        )
    except ValueError as error:
        raise ModelUnsupported(f"{source} cannot be converted: {error}") from error


def _tokenizer(source: Path) -> Any:
    kind, split = _tokenizer_kind(source)
    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    backend = tokenizer.backend_tokenizer
    if kind == "gpt2" and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        if split in _DIGITS_ALONE:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        elif split not in _PLAIN_BYTE_LEVEL:
            raise ModelUnsupported(
                f"{source}: how its tokenizer splits text (tokenizer.ggml.pre: {split}) is not known here; "
                "take the tokenizer from the model's original repository"
            )
    return tokenizer


def _tokenizer_kind(source: Path) -> tuple[str, str]:
    """The file's tokenizer.ggml.model and tokenizer.ggml.pre."""
    try:
        fields = GGUFReader(source).fields
    except ValueError as error:
        raise ModelNotFound(f"{source} is not a readable GGUF file: {error}") from None
    kind, split = (
        str(fields[key].contents()) if key in fields else "default"
        for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    return kind, split


def _make_readable(folder: Path) -> None:
    """Give the folder and its files the usual permissions: a pod's user is not the one who converted."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit code is 0 or that of the error."""
    parser = argparse.ArgumentParser(prog="paceline_server.convert", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="MODEL.gguf")
    parser.add_argument("destination", type=Path, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    unwind_on_sigterm()
    try:
        convert_gguf(chosen.source, chosen.destination)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
