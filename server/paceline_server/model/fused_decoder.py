"""A Llama-like model as one C++ call a step: no Python and no small operations between its layers.

`backend` makes it out of a checkpoint. The weights are packed layer by layer as they are read, so that a model is never
in memory twice, and nothing here or below needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_double
from typing import Any

import numpy as np

from paceline_server.model.attention.cpu import CpuAttention
from paceline_server.model.checkpoint import Checkpoint
from paceline_server.model.formats import Floats, Numbers, narrowed, widened
from paceline_server.model.fused_layers import LayerReader, decoder_shape, norms_follow
from paceline_server.model.native import (
    LayerSource,
    StepInput,
    ThreadPool,
    address,
    source,
)
from paceline_server.model.native_sampler import sample
from paceline_server.model.packing import PackedBatch, SamplingBatch
from paceline_server.model.rotary import Rotary
from paceline_server.model.rotation import (
    Rotation,
    Weights,
    hadamard_factor,
    rotate_down_inputs,
    rotate_stream,
    rotate_values,
)
from paceline_server.model.support import layer_windows

STAGES = ("rows", "attention", "projections", "output", "gated", "down", "head")
"""Where the time of a step goes: norms, rotation and conversions; attention; each of the matrix products."""

_FORMATS = {"float32": 0, "bfloat16": 1}
_INT8 = 2


class FusedDecoder:
    """The weights of a model, packed.

    Args:
        checkpoint: open; it may be closed afterwards.
        config: complete, see `config_file`.
        dtype: float32 or bfloat16, of the weights in memory.
        pool: computes.
        int8: quantize the weights of the layers and of the head.

    Raises:
        ModelUnsupported: checkpoint and configuration do not go together.
        OutOfMemory: the packed weights do not fit.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: str, pool: ThreadPool, *, int8: bool = False
    ) -> None:
        reader = LayerReader(checkpoint, config, dtype)
        self._pool = pool
        self._rotary = Rotary(config)
        self._shape = decoder_shape(config, self._rotary, dtype)
        self._shape.weight_format = self._shape.head_format = _INT8 if int8 else _FORMATS[dtype]
        if int8:
            self._shape.down_factor = hadamard_factor(self._shape.intermediate)
        # A norm on its way back to the stream (OLMo 2, Gemma) would scale the channels of Q; there, only the heads and
        # the inputs of the down projection can be rotated.
        rotation = Rotation(self._shape.hidden) if int8 and not norms_follow(config) else None
        self._make(reader, rotation)
        windows, kinds = layer_windows(config), config.get("layer_types")
        for index, window in enumerate(windows):
            table = self._rotary.table_of(kinds[index]) if kinds else 0
            self._add_layer(reader.layer(index), window, table, rotation)

    def _make(self, reader: LayerReader, rotation: Rotation | None) -> None:
        """The decoder without its layers."""
        embedding, head, final_norm = reader.embedding(), reader.head(), reader.final_norm()
        if rotation is None:
            self._embedding: Numbers = embedding.copy()  # read at every step, when the file is closed
        else:
            head = rotation.apply(widened(head) * widened(final_norm))
            final_norm = np.ones(final_norm.shape, dtype=np.float32)
            turned = rotation.apply(widened(embedding))
            self._embedding = turned if embedding.dtype == np.float32 else narrowed(turned)
        sources = [source(numbers) for numbers in (self._embedding, final_norm, head, None)]
        self.handle = self._pool.library.make("decoder", self._pool.handle.address, self._shape, *sources)

    def _add_layer(self, weights: Weights, window: int | None, table: int, rotation: Rotation | None) -> None:
        if rotation is not None:
            rotate_stream(weights, rotation)
        if self._shape.weight_format == _INT8:
            rotate_values(weights, self._shape.head_dim)
            rotate_down_inputs(weights, self._shape.down_factor)
        fields = LayerSource(
            window=window or 0,
            rotary_table=table,
            **{name: source(numbers) for name, numbers in weights.items()},
        )
        self._pool.library.require("decoder_add_layer", self.handle.address, fields)

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return int(self._shape.vocabulary)

    def seconds(self) -> dict[str, float]:
        """Time of all steps so far, by stage."""
        seconds = (c_double * len(STAGES))()
        self._pool.library.call("decoder_seconds", self.handle.address, seconds)
        return dict(zip(STAGES, seconds, strict=True))

    def logits(self, batch: PackedBatch, attention: CpuAttention) -> Floats:
        """Compute a step: [R, vocabulary] for the R rows that are sampled. `attention` has planned it."""
        cosine, sine = self._rotary.tables(batch.positions)
        logits = np.empty((len(batch.logits_rows), self.vocabulary), dtype=np.float32)
        step = StepInput(
            token_ids=address(batch.token_ids),
            cosine=address(cosine, np.float32),
            sine=address(sine, np.float32),
            logits_rows_count=len(batch.logits_rows),
            logits_rows=address(batch.logits_rows),
        )
        self._pool.library.require(
            "decoder_step",
            self.handle.address,
            attention.handle.address,
            attention.step,
            step,
            address(logits, np.float32),
        )
        return logits

    def sample(self, logits: Floats, settings: SamplingBatch) -> list[int]:
        """Draw one token a row of `logits`, which are overwritten."""
        return sample(self._pool, logits, settings)


class FusedModel:
    """A fused decoder on its cache. See `runner.StepModel`."""

    def __init__(self, decoder: FusedDecoder, attention: CpuAttention) -> None:
        self.storage = attention
        self.decoder = decoder
        self.on_idle: Callable[[], None] | None = None
        self._attention = attention

    def logits(self, batch: PackedBatch) -> Floats:
        """Compute a step: [R, vocabulary]."""
        self._attention.plan(batch)
        return self.decoder.logits(batch, self._attention)

    def sample(self, logits: Floats, settings: SamplingBatch) -> list[int]:
        """Draw one token a row."""
        return self.decoder.sample(logits, settings)
