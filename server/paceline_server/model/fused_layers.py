"""A Llama-like decoder of transformers taken apart: its sizes and its layers' tensors, as the C++ kernels name them.

`fused_decoder` packs what is found here. Everything that a family does differently from Llama is read off its modules,
or off its configuration where the modules do not say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline_server.model.loader import CausalModel
from paceline_server.model.native import DecoderShape
from paceline_server.model.rotation import Weights

FUSED_FAMILIES = frozenset({"gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"})
"""Values of model_type whose layers are built as the kernels' decoder."""

_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}

_NORMS_FROM_ONE = frozenset({"gemma2", "gemma3_text"})
"""Families that store a norm's weight as its difference from one."""


def obstacle_to_fusing(config: Any) -> str | None:
    """Why a model of this transformers configuration is none that we fuse; None where it is one."""
    if config.model_type not in FUSED_FAMILIES:
        return f"does not do model_type {config.model_type}, only {', '.join(sorted(FUSED_FAMILIES))}"
    if _activation(config) not in _ACTIVATIONS:
        return f"does not do {_activation(config)} in the MLP, only {' and '.join(_ACTIVATIONS)}"
    return None


def decoder_shape(model: CausalModel) -> DecoderShape:
    """Sizes and factors; the number formats of the weights are left to be set."""
    decoder, config = model.decoder, model.config
    attention = decoder.layers[0].self_attn
    query_norm = getattr(attention, "q_norm", None)
    head_dim = int(attention.head_dim)
    cosine, _ = rotary_tables(decoder.rotary_emb, torch.zeros(1, 1, dtype=torch.int64))
    return DecoderShape(
        hidden=int(config.hidden_size),
        intermediate=int(config.intermediate_size),
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        rotary=cosine.shape[-1],
        vocabulary=model.head.weight.shape[0],
        norm_whole_rows=int(query_norm is not None and query_norm.weight.numel() != head_dim),
        gelu=_ACTIVATIONS[_activation(config)],
        down_factor=1,
        epsilon=float(config.rms_norm_eps),
        attention_scale=float(attention.scaling),
        attention_softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        embedding_scale=_embedding_scale(decoder.embed_tokens, config),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logits_scale=model.logits_scale,
        logits_softcap=model.logits_softcap or 0.0,
    )


def rotary_tables(module: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [1, T], float32 [tables, T, rotary] each; see `rotary_table` for the order."""
    like = torch.empty(0, dtype=torch.float32)  # tells the module what type its tables are to have
    kinds = rotary_kinds(module)
    tables = [module(like, positions, kind) for kind in kinds] if kinds else [module(like, positions)]
    return torch.cat([cosine for cosine, _ in tables]), torch.cat([sine for _, sine in tables])


def rotary_kinds(module: Any) -> tuple[str, ...]:
    """Kinds of layers that turn by a table of their own (Gemma 3), in the order of the tables; none where all share."""
    return tuple(sorted(getattr(module, "layer_types", ())))


def layer_weights(layer: Any, shape: DecoderShape, family: str) -> Weights:
    """The tensors of one layer by the names of `native.LayerSource`."""
    attention, mlp = layer.self_attn, layer.mlp
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights: Weights = {
        "output": attention.o_proj.weight.detach(),
        "output_bias": bias(attention.o_proj),
        "down": mlp.down_proj.weight.detach(),
        "down_bias": bias(mlp.down_proj),
    }
    projections = _parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), [query, key, key])
    gated = _parts(mlp, "gate_up_proj", ("gate_proj", "up_proj"), [shape.intermediate, shape.intermediate])
    for name, (tensor, its_bias) in zip(("query", "key", "value", "gate", "up"), projections + gated, strict=True):
        weights |= {name: tensor, f"{name}_bias": its_bias}
    for name, module in _norms(layer).items():
        weights[name] = norm_weight(module, family)
    return weights


def norm_weight(module: Any, family: str) -> Tensor:
    """What a norm multiplies its rows with."""
    stored = weight(module)
    return stored.float() + 1.0 if family in _NORMS_FROM_ONE else stored


def weight(module: Any) -> Tensor:
    """A module's weight, out of autograd's sight."""
    tensor: Tensor = module.weight.detach()
    return tensor


def bias(linear: Any) -> Tensor | None:
    """A linear layer's bias, where it has one."""
    tensor = getattr(linear, "bias", None)
    return None if tensor is None else tensor.detach()


def empty(module: nn.Module) -> None:
    """Let go of a module's weights; what else refers to them, as a tied embedding does, keeps them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)


def _norms(layer: Any) -> dict[str, nn.Module]:
    """A layer's norms by our names: a norm after attention precedes the MLP, unless the MLP has one of its own."""
    own = hasattr(layer, "post_feedforward_layernorm")
    places = {
        "attention_norm": (layer, "input_layernorm"),
        "attention_after_norm" if own else "mlp_norm": (layer, "post_attention_layernorm"),
        "mlp_after_norm": (layer, "post_feedforward_layernorm"),
        "query_norm": (layer.self_attn, "q_norm"),
        "key_norm": (layer.self_attn, "k_norm"),
    }
    if own:
        places["mlp_norm"] = (layer, "pre_feedforward_layernorm")
    return {name: getattr(owner, key) for name, (owner, key) in places.items() if hasattr(owner, key)}


def _parts(module: Any, joined: str, separate: tuple[str, ...], sizes: list[int]) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of linear layers that some families have joined into one (Phi 3)."""
    if not hasattr(module, joined):
        return [(weight(getattr(module, name)), bias(getattr(module, name))) for name in separate]
    linear = getattr(module, joined)
    its_bias = bias(linear)
    biases: list[Tensor | None] = [None] * len(sizes) if its_bias is None else list(torch.split(its_bias, sizes))
    return list(zip(torch.split(weight(linear), sizes), biases, strict=True))


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _embedding_scale(embedding: Any, config: Any) -> float:
    """Gemma rounds its factor to the weights' format, and its embedding module holds it; Granite configures one."""
    if hasattr(embedding, "embed_scale"):
        return float(embedding.embed_scale.to(embedding.weight.dtype))
    return float(getattr(config, "embedding_multiplier", 1.0))
