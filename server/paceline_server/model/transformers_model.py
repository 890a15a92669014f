"""A step through transformers' own layers, over any attention back end. `transformers_backend` makes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline_server.model.attention.interface import PagedAttention
from paceline_server.model.cache import BlockStorage
from paceline_server.model.loader import CausalModel
from paceline_server.model.packing import PackedBatch, SamplingBatch
from paceline_server.model.sampler import sample


class TransformersModel:
    """A model as transformers runs it, layer by layer. See `runner.StepModel`.

    Args:
        model: loaded, with `attention` attached to its layers.
        attention: over the KV cache.
        storage: that cache's blocks.
        device: where all are.
    """

    def __init__(
        self, model: CausalModel, attention: PagedAttention, storage: BlockStorage, device: torch.device
    ) -> None:
        self.storage = storage
        self.on_idle: Callable[[], None] | None = None
        self._model = model
        self._attention = attention
        self._device = device

    @torch.no_grad()
    def logits(self, batch: PackedBatch) -> Tensor:
        """Run the decoder over all rows, and the head over those that are sampled."""
        self._attention.plan(batch)
        hidden = self._model.hidden_states(
            torch.from_numpy(batch.token_ids).to(self._device), torch.from_numpy(batch.positions).to(self._device)
        )
        return self._model.logits(hidden[torch.from_numpy(batch.logits_rows).to(self._device)])

    @torch.no_grad()
    def sample(self, logits: Tensor, settings: SamplingBatch) -> list[int]:
        """Draw the tokens on the device."""
        return sample(logits, settings)
