"""What every attention back end does: plan once a step, then run once a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline_server.model.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How a layer scores the keys that a row sees.

    Attributes:
        scale: factor of the products of query and key.
        window: keys that a row sees at most: the newest, its own included. None is all.
        softcap: a score s becomes softcap * tanh(s / softcap) before the softmax (Gemma 2). None leaves it.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class PagedAttention(Protocol):
    """Causal attention of packed tokens over the keys and values in the cache. Owns the cache's layout."""

    def plan(self, batch: PackedBatch) -> None:
        """Prepare what all layers of a step share. Called once a step, before the first `forward`."""
        ...

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """Write the step's keys and values into a layer's cache and attend.

        Args:
            layer: number of the layer, from 0.
            query: [T, H, D], H query heads of size D.
            key: [T, K, D], K key/value heads; H is a multiple of K, and query head h reads head h // (H / K).
            value: [T, K, D].
            rule: how the scores come about.

        Returns:
            [T, H, D], contiguous.
        """
        ...
