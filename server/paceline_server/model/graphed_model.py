"""A model of transformers whose decodes are replayed from CUDA graphs: see `graphs`.

`transformers_backend` makes it on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from paceline_server.model.attention.interface import PagedAttention
from paceline_server.model.cache import BlockStorage
from paceline_server.model.graphs import GraphBook, GraphDevice, empty_decode, pad_decodes
from paceline_server.model.loader import CausalModel
from paceline_server.model.packing import PackedBatch, SamplingBatch
from paceline_server.model.transformers_model import TransformersModel

log = logging.getLogger("paceline.model")


@runtime_checkable
class StationaryAttention(PagedAttention, Protocol):
    """Attention whose plan of a step lies where that of the last one lay, and that writes nothing to negative slots."""

    @property
    def generation(self) -> int:
        """Grows when it had to lie elsewhere."""
        ...


class GraphedModel:
    """See `runner.StepModel`.

    Args:
        model: loaded, with `attention` attached to its layers.
        attention: over the KV cache.
        storage: that cache's blocks.
        device: where all are.
        book: which steps are captured.
        graphs: captures.
    """

    def __init__(
        self,
        model: CausalModel,
        attention: StationaryAttention,
        storage: BlockStorage,
        device: torch.device,
        book: GraphBook,
        graphs: GraphDevice,
    ) -> None:
        self.storage = storage
        self._eager = TransformersModel(model, attention, storage, device)
        self._model = model
        self._attention = attention
        self._device = device
        self._book = book
        self._graphs = graphs
        # What a captured step reads and writes, by size
        self._inputs: dict[int, Tensor] = {}  # [2, size]: token ids, positions
        self._outputs: dict[int, Tensor] = {}  # [size, vocabulary]

    @torch.no_grad()
    def logits(self, batch: PackedBatch) -> Tensor:
        """Replay a decode that is captured, padded; run anything else as usual."""
        size = self._book.padded(batch)
        if size is None:
            return self._eager.logits(batch)
        padded = pad_decodes(batch, size)
        self._attention.plan(padded)
        self._book.expect(self._attention.generation)
        replay = self._book.find(size)
        if replay is None:
            return self._eager.logits(batch)
        self._fill(self._inputs[size], padded)
        replay()
        return self._outputs[size][: batch.num_tokens].clone()  # the next step overwrites it

    @torch.no_grad()
    def sample(self, logits: Tensor, settings: SamplingBatch) -> list[int]:
        """Draw the tokens on the device, as without graphs."""
        return self._eager.sample(logits, settings)

    @property
    def on_idle(self) -> Callable[[], None]:
        """Capture, one size at a time."""
        return self.capture_wanted

    @torch.no_grad()
    def capture_wanted(self) -> None:
        """Capture the size that was wanted most, if any; the cache's content stays as it is."""
        size = self._book.next_wanted()
        if size is None:
            return
        nothing = pad_decodes(empty_decode(), size)
        self._attention.plan(nothing)
        self._inputs[size] = inputs = torch.zeros(2, size, dtype=torch.int64, device=self._device)

        def step() -> None:
            logits = self._model.logits(self._model.hidden_states(inputs[0], inputs[1]))
            if size not in self._outputs:
                self._outputs[size] = torch.empty_like(logits)
            self._outputs[size].copy_(logits)

        try:
            captured = self._graphs.capture(step)
        except torch.OutOfMemoryError:
            log.warning("no room is left to capture decodes of %d sequences: they run without a graph", size)
            self._book.refuse(size)
            return
        self._book.keep(size, captured, self._attention.generation)

    def _fill(self, inputs: Tensor, batch: PackedBatch) -> None:
        rows = torch.from_numpy(np.stack((batch.token_ids, batch.positions)))
        inputs.copy_(rows.pin_memory() if self._device.type == "cuda" else rows, non_blocking=True)
