"""A Llama-like model as one C++ call a step: no Python and no small tensor operations between its layers.

`startup` fuses a model that `loader` has read. The weights are packed layer by layer, and what was packed is freed, so
that a model is never in memory twice. Everything that a family does differently from Llama is read off its modules.
"""

from __future__ import annotations

from ctypes import c_double
from typing import Any

import torch
from torch import Tensor, nn

from paceline_server.model.attention.cpu import CpuAttention
from paceline_server.model.loader import CausalModel
from paceline_server.model.native import (
    DecoderShape,
    LayerSource,
    StepInput,
    ThreadPool,
    address,
    source,
)
from paceline_server.model.packing import PackedBatch
from paceline_server.model.rotation import (
    Rotation,
    Weights,
    hadamard_factor,
    rotate_down_inputs,
    rotate_stream,
    rotate_values,
)
from paceline_server.model.support import layer_windows

FUSED_FAMILIES = frozenset({"granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"})
"""Values of model_type whose layers are built as this decoder's."""

STAGES = ("rows", "attention", "projections", "output", "gated", "down", "head")
"""Where the time of a step goes: norms, rotation and conversions; attention; each of the matrix products."""

_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_INT8 = 2


def obstacle_to_fusing(config: Any) -> str | None:
    """Why a model of this transformers configuration is none that we fuse; None where it is one."""
    if config.model_type not in FUSED_FAMILIES:
        return f"does not do model_type {config.model_type}, only {', '.join(sorted(FUSED_FAMILIES))}"
    if config.hidden_act != "silu":
        return f"does not do hidden_act {config.hidden_act}, only silu"
    return "does not do sliding windows" if any(layer_windows(config.to_dict())) else None


class FusedDecoder:
    """The weights of a model, packed.

    Args:
        model: on the CPU, in float32 or bfloat16; its layers are empty afterwards.
        pool: computes.
        int8: quantize the weights of the layers and of the head.

    Raises:
        OutOfMemory: the packed weights do not fit.
    """

    def __init__(self, model: CausalModel, pool: ThreadPool, *, int8: bool = False) -> None:
        decoder, head = model.decoder, model.head
        self._pool = pool
        self._rotary: Any = decoder.rotary_emb
        self._shape = _shape(model, _INT8 if int8 else _FORMATS[_weight(head).dtype])
        self._embedding = _weight(decoder.embed_tokens)  # read at every step
        final_norm, head_weight = _weight(decoder.norm), _weight(head)
        # A norm on its way back to the stream (OLMo 2) would scale the channels of Q; only the heads can be rotated.
        rotation = Rotation(self._shape.hidden) if int8 and not self._shape.norm_after else None
        if rotation is not None:
            head_weight = rotation.apply(head_weight * final_norm.to(torch.float32))
            final_norm = torch.ones_like(final_norm)
            self._embedding = rotation.apply(self._embedding).to(self._embedding.dtype)
        self.handle = pool.library.make(
            "decoder",
            pool.handle.address,
            self._shape,
            *(source(tensor) for tensor in (self._embedding, final_norm, head_weight, _bias(head))),
        )
        del head_weight
        _empty(head)
        for layer in decoder.layers:  # type: ignore[union-attr]
            weights = _layer_weights(layer, self._shape)
            if rotation is not None:
                rotate_stream(weights, rotation)
            if int8:
                rotate_values(weights, self._shape.head_dim)
                rotate_down_inputs(weights, self._shape.down_factor)
            fields = {name: source(tensor) for name, tensor in weights.items()}
            pool.library.require("decoder_add_layer", self.handle.address, LayerSource(**fields))
            _empty(layer)

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return int(self._shape.vocabulary)

    def seconds(self) -> dict[str, float]:
        """Time of all steps so far, by stage."""
        seconds = (c_double * len(STAGES))()
        self._pool.library.call("decoder_seconds", self.handle.address, seconds)
        return dict(zip(STAGES, seconds, strict=True))

    def logits(self, batch: PackedBatch, attention: CpuAttention) -> Tensor:
        """Compute a step: [R, vocabulary] float32 for the R rows that are sampled. `attention` has planned it."""
        positions = torch.from_numpy(batch.positions)[None]
        cosine, sine = (table[0].contiguous() for table in self._rotary(self._float, positions))
        logits = torch.empty(len(batch.logits_rows), self.vocabulary, dtype=torch.float32)
        step = StepInput(
            token_ids=address(batch.token_ids),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            logits_rows_count=len(batch.logits_rows),
            logits_rows=address(batch.logits_rows),
        )
        self._pool.library.require(
            "decoder_step", self.handle.address, attention.handle.address, attention.step, step, logits.data_ptr()
        )
        return logits

    _float = torch.empty(0, dtype=torch.float32)
    """Tells the rotary module what type its tables are to have."""


class FusedModel:
    """A fused decoder on its cache. See `runner.StepModel`."""

    def __init__(self, decoder: FusedDecoder, attention: CpuAttention) -> None:
        self.storage = attention
        self._decoder = decoder
        self._attention = attention

    def logits(self, batch: PackedBatch) -> Tensor:
        """Compute a step: [R, vocabulary] float32."""
        self._attention.plan(batch)
        return self._decoder.logits(batch, self._attention)


def _shape(model: CausalModel, weight_format: int) -> DecoderShape:
    decoder, config = model.decoder, model.config
    first: Any = decoder.layers[0]  # type: ignore[index]
    attention = first.self_attn
    heads = int(config.num_attention_heads)
    query_norm = getattr(attention, "q_norm", None)
    head_dim = int(attention.head_dim)
    cosine, _ = decoder.rotary_emb(torch.empty(0), torch.zeros(1, 1, dtype=torch.int64))  # type: ignore[operator]
    return DecoderShape(
        hidden=int(config.hidden_size),
        intermediate=int(config.intermediate_size),
        heads=heads,
        kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        rotary=cosine.shape[-1],
        vocabulary=model.head.weight.shape[0],  # type: ignore[index]
        norm_after=int(not hasattr(first, "input_layernorm")),
        norm_whole_rows=int(query_norm is not None and query_norm.weight.numel() != head_dim),
        weight_format=weight_format,
        head_format=weight_format,
        down_factor=hadamard_factor(int(config.intermediate_size)) if weight_format == _INT8 else 1,
        epsilon=float(config.rms_norm_eps),
        attention_scale=float(attention.scaling),
        embedding_scale=float(getattr(config, "embedding_multiplier", 1.0)),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logits_scale=model.logits_scale,
    )


def _layer_weights(layer: Any, shape: DecoderShape) -> Weights:
    """The tensors of one layer by the names of `native.LayerSource`."""
    attention, mlp = layer.self_attn, layer.mlp
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.norm_after:
        norms = layer.post_attention_layernorm, layer.post_feedforward_layernorm
    else:
        norms = layer.input_layernorm, layer.post_attention_layernorm
    weights: Weights = {
        "attention_norm": norms[0].weight.detach(),
        "mlp_norm": norms[1].weight.detach(),
        "output": attention.o_proj.weight.detach(),
        "output_bias": _bias(attention.o_proj),
        "down": mlp.down_proj.weight.detach(),
        "down_bias": _bias(mlp.down_proj),
    }
    projections = _parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), [query, key, key])
    gated = _parts(mlp, "gate_up_proj", ("gate_proj", "up_proj"), [shape.intermediate, shape.intermediate])
    for name, (weight, bias) in zip(("query", "key", "value", "gate", "up"), projections + gated, strict=True):
        weights |= {name: weight, f"{name}_bias": bias}
    for name, module in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        if hasattr(attention, module):
            weights[name] = getattr(attention, module).weight.detach()
    return weights


def _parts(module: Any, joined: str, separate: tuple[str, ...], sizes: list[int]) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of linear layers that some families have joined into one (Phi 3)."""
    if not hasattr(module, joined):
        return [(getattr(module, name).weight.detach(), _bias(getattr(module, name))) for name in separate]
    linear = getattr(module, joined)
    bias = _bias(linear)
    biases: list[Tensor | None] = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
    return list(zip(torch.split(linear.weight.detach(), sizes), biases, strict=True))


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach()
    return weight


def _bias(linear: Any) -> Tensor | None:
    bias = getattr(linear, "bias", None)
    return None if bias is None else bias.detach()


def _empty(module: nn.Module) -> None:
    """Let go of a module's weights; what else refers to them, as a tied embedding does, keeps them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
