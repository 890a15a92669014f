"""From a configuration to a warmed-up sentence encoder, phase by phase. `engine.process` calls `load` once."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import AutoModel

from paceline_server.config import BatchingConfig, EngineConfig, ServerConfig
from paceline_server.engine.interface import ModelInfo, Task
from paceline_server.engine.loop import LoadedEncoder
from paceline_server.errors import InvalidConfiguration, OutOfMemory
from paceline_server.model.encoder import IMPLEMENTATION, SentenceEncoder
from paceline_server.model.loader import read_config, read_weights
from paceline_server.model.machine import available_memory, choose_device, choose_dtype, cores_given
from paceline_server.model.phases import OnPhase, phase
from paceline_server.model.sentence import longest_text, read_sentence_model, require_encoder

log = logging.getLogger("paceline.model")

_BATCH_BYTES = 256 << 20
"""Memory left free on a CPU beside the weights: what a batch needs."""


def load(config: ServerConfig, folder: Path, on_phase: OnPhase) -> LoadedEncoder:
    """Load and warm up the sentence encoder of a folder.

    Args:
        config: of the whole server; what concerns the KV cache means nothing to a model that embeds.
        on_phase: told of each phase at its begin, with seconds None, and at its end.

    Raises:
        StartupError: see the subclasses; every one names what to do.
    """
    _require_plain(config.engine)
    device = torch.device(choose_device(config.engine.device))
    if device.type == "cpu":
        torch.set_num_threads(config.engine.threads or cores_given())
    with phase("load_weights", on_phase):
        sentence = read_sentence_model(folder)
        model_config = read_config(folder, require_encoder)
        longest = longest_text(sentence, model_config.to_dict(), config.engine.max_model_len)
        stored = model_config.to_dict().get("dtype")
        dtype = getattr(torch, choose_dtype(config.engine.dtype, stored, device.type))
        memory = available_memory() - _BATCH_BYTES
        model = read_weights(
            AutoModel, folder, model_config, dtype, device, memory, attention=IMPLEMENTATION, add_pooling_layer=False
        )
        encoder = SentenceEncoder(model, sentence, device)
    with phase("warmup", on_phase):
        try:
            encoder.warm_up(_largest_batch(config.batching, longest))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"a batch of the largest size does not fit beside the weights: {error}") from None
    info = ModelInfo(
        folder=str(folder),
        max_model_len=longest,
        vocab_size=int(model_config.vocab_size),
        eos_token_ids=(),
        num_blocks=0,
        block_size=config.kv_cache.block_size_tokens,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        attention_backend="reference",
        task=Task.EMBED,
        dimensions=int(model_config.hidden_size),
    )
    log.info("loaded %s", info)
    return LoadedEncoder(encoder, info)


def _require_plain(engine: EngineConfig) -> None:
    if engine.quantization is not None:
        raise InvalidConfiguration(f"engine.quantization: {engine.quantization} is for models that generate text")
    if engine.attention_backend not in ("auto", "reference"):
        raise InvalidConfiguration(
            f"engine.attention_backend: {engine.attention_backend} is for models that generate text; "
            "leave it at auto for a model that embeds"
        )


def _largest_batch(batching: BatchingConfig, longest: int) -> list[list[int]]:
    """Texts of the greatest length, as many as a batch holds tokens for; and the rest of its tokens as one more."""
    whole, rest = divmod(batching.max_tokens_in_batch, longest)
    texts = [[0] * longest] * whole + [[0] * rest] * (rest > 0)
    return texts[: batching.max_batch_size]
