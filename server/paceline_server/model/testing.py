"""Small models with random weights, for tests: every family on the CPU in a fraction of a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from paceline_server.config import ServerConfig, parse
from paceline_server.model import native
from paceline_server.model.attention.cpu import CpuAttention
from paceline_server.model.attention.interface import ScoreRule
from paceline_server.model.graphs import Captured

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # the usual 0.02 gives logits so flat that an error in attention would not show
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_tiny_model(folder: Path, family: str = "llama", seed: int = 0, **settings: Any) -> Path:
    """Write a model of random weights as transformers does; returns its folder.

    Args:
        folder: where to.
        family: its model_type.
        seed: of the weights.
        settings: changes to its configuration.
    """
    config = AutoConfig.for_model(family, **(_SIZES | settings))
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_tiny_encoder(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Write a sentence encoder of random weights as sentence-transformers does, without a tokenizer.

    Args:
        settings: changes to its configuration.
    """
    sizes = {key: _SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "initializer_range")}
    config = AutoConfig.for_model("bert", **sizes, num_hidden_layers=3, num_attention_heads=6, **settings)
    torch.manual_seed(seed)
    AutoModel.from_config(config, add_pooling_layer=False).save_pretrained(folder)
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    return folder


def generate(model: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """What transformers' own `generate` makes of a prompt, greedily.

    Args:
        model: of transformers.
        count: new tokens at most.

    Returns:
        The new tokens, and the smallest lead that one of them had before the second best, in logits: where two programs
        differ by more than that, chance decides.
    """
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        output_logits=True,
        return_dict_in_generate=True,
    )
    first, second = torch.cat(result.logits).topk(2).values.T
    return result.sequences[0, len(prompt) :].tolist(), float((first - second).min())


def tiny_config(folder: Path, **groups: dict[str, Any]) -> ServerConfig:
    """A server configuration for a tiny model: one thread, blocks of 4 tokens, a KV cache of 4 MiB."""
    defaults: dict[str, dict[str, Any]] = {
        "engine": {"model_path": str(folder), "device": "cpu", "threads": 1},
        "batching": {"max_batch_size": 8, "max_tokens_in_batch": 64},
        "kv_cache": {"block_size_tokens": 4, "cpu_memory_gb": 1 / 256},
    }
    return parse({group: keys | groups.get(group, {}) for group, keys in defaults.items()})


class TorchCpuAttention(CpuAttention):
    """The kernels' attention by itself, for a model whose layers run in torch. Implements `PagedAttention`."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """Write, then attend; in float32, whatever the cache holds."""
        library, cache, heads = self._pool.library, self.handle.address, query.shape[1]
        library.call("attention_plan", cache, self.step, heads)
        queries, keys, values = (tensor.to(torch.float32).contiguous() for tensor in (query, key, value))
        output = torch.empty_like(queries)
        library.call("attention_write", cache, self.step, layer, keys.data_ptr(), values.data_ptr())
        native_rule = native.ScoreRule(rule.scale, rule.softcap or 0.0, rule.window or 0)
        library.call("attention_forward", cache, layer, queries.data_ptr(), heads, native_rule, output.data_ptr())
        return output.to(query.dtype)


class FakeGraphDevice:
    """A `graphs.GraphDevice` without a GPU: a replay calls the step again.

    Attributes:
        captures: how often something was captured.
        replays: how often something was replayed.
        full: refuse the next captures, as a GPU without memory does.
    """

    def __init__(self, bytes_each: int = 100) -> None:
        self.captures = 0
        self.replays = 0
        self.full = False
        self._bytes_each = bytes_each

    def capture(self, step: Callable[[], None]) -> Captured:
        """Run the step once."""
        if self.full:
            raise torch.OutOfMemoryError("no memory")
        step()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            step()

        return Captured(replay, self._bytes_each)
