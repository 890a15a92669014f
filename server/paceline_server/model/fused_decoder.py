"""A Llama-like model as one C++ call a step: no Python and no small tensor operations between its layers.

`backend` fuses a model that `loader` has read. The weights are packed layer by layer, and what was packed is freed, so
that a model is never in memory twice.
"""

from __future__ import annotations

from ctypes import c_double
from typing import Any

import torch
from torch import Tensor

from paceline_server.model.attention.cpu import CpuAttention
from paceline_server.model.fused_layers import (
    bias,
    decoder_shape,
    empty,
    layer_weights,
    norm_weight,
    rotary_kinds,
    rotary_tables,
    weight,
)
from paceline_server.model.loader import CausalModel
from paceline_server.model.native import (
    LayerSource,
    StepInput,
    ThreadPool,
    address,
    source,
)
from paceline_server.model.native_sampler import sample
from paceline_server.model.packing import PackedBatch, SamplingBatch
from paceline_server.model.rotation import (
    Rotation,
    hadamard_factor,
    rotate_down_inputs,
    rotate_stream,
    rotate_values,
)
from paceline_server.model.support import layer_windows

STAGES = ("rows", "attention", "projections", "output", "gated", "down", "head")
"""Where the time of a step goes: norms, rotation and conversions; attention; each of the matrix products."""

_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_INT8 = 2


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
        decoder, head, family = model.decoder, model.head, model.config.model_type
        self._pool = pool
        self._rotary: Any = decoder.rotary_emb
        self._shape = decoder_shape(model)
        self._shape.weight_format = self._shape.head_format = _INT8 if int8 else _FORMATS[weight(head).dtype]
        if int8:
            self._shape.down_factor = hadamard_factor(self._shape.intermediate)
        self._embedding = weight(decoder.embed_tokens)  # read at every step
        final_norm, head_weight = norm_weight(decoder.norm, family), weight(head)
        # A norm on its way back to the stream (OLMo 2, Gemma) would scale the channels of Q; there, only the heads and
        # the inputs of the down projection can be rotated.
        norm_after = hasattr(decoder.layers[0], "post_feedforward_layernorm")
        rotation = Rotation(self._shape.hidden) if int8 and not norm_after else None
        if rotation is not None:
            head_weight = rotation.apply(head_weight * final_norm.to(torch.float32))
            final_norm = torch.ones_like(final_norm)
            self._embedding = rotation.apply(self._embedding).to(self._embedding.dtype)
        self.handle = pool.library.make(
            "decoder",
            pool.handle.address,
            self._shape,
            *(source(tensor) for tensor in (self._embedding, final_norm, head_weight, bias(head))),
        )
        del head_weight
        empty(head)
        windows = layer_windows(model.config.to_dict())
        for layer, window in zip(decoder.layers, windows, strict=True):
            self._add_layer(layer, window, family, rotation)

    def _add_layer(self, layer: Any, window: int | None, family: str, rotation: Rotation | None) -> None:
        weights = layer_weights(layer, self._shape, family)
        if rotation is not None:
            rotate_stream(weights, rotation)
        if self._shape.weight_format == _INT8:
            rotate_values(weights, self._shape.head_dim)
            rotate_down_inputs(weights, self._shape.down_factor)
        kinds = rotary_kinds(self._rotary)
        fields = LayerSource(
            window=window or 0,
            rotary_table=kinds.index(layer.self_attn.layer_type) if kinds else 0,
            **{name: source(tensor) for name, tensor in weights.items()},
        )
        self._pool.library.require("decoder_add_layer", self.handle.address, fields)
        empty(layer)

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
        cosine, sine = rotary_tables(self._rotary, torch.from_numpy(batch.positions)[None])
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

    def sample(self, logits: Tensor, settings: SamplingBatch) -> list[int]:
        """Draw one token a row of `logits`, which are overwritten."""
        return sample(self._pool, logits, settings)


class FusedModel:
    """A fused decoder on its cache. See `runner.StepModel`."""

    def __init__(self, decoder: FusedDecoder, attention: CpuAttention) -> None:
        self.storage = attention
        self.decoder = decoder
        self._attention = attention

    def logits(self, batch: PackedBatch) -> Tensor:
        """Compute a step: [R, vocabulary] float32."""
        self._attention.plan(batch)
        return self.decoder.logits(batch, self._attention)

    def sample(self, logits: Tensor, settings: SamplingBatch) -> list[int]:
        """Draw one token a row."""
        return self.decoder.sample(logits, settings)
