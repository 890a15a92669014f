"""A sentence encoder: texts packed into one row, read by transformers' BERT, pooled and normalised.

`encoder_startup` loads it; `engine.embedder` calls `encode` once a batch. Texts are packed, not padded: the matrix
products see exactly the tokens there are, whatever the lengths in the batch, and attention goes text by text (decision
0011).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention
from transformers import AttentionInterface

from paceline_server.errors import EngineFailed
from paceline_server.model.sentence import SentenceModel

IMPLEMENTATION = "paceline_texts"
"""Our name in transformers' registry of attention functions. No mask function goes by it, so no mask is built."""

_ATTRIBUTE = "paceline_texts"


class Spans:
    """Where each text of the batch under way lies in the row; shared by all layers."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, int]] = []


class SentenceEncoder:
    """Implements `engine.batch.Encoder`.

    Args:
        model: a BERT without its pooler, with `IMPLEMENTATION` as its attention, in evaluation mode.
        sentence: what is done with its hidden states.
        device: where the model is.
    """

    def __init__(self, model: nn.Module, sentence: SentenceModel, device: torch.device) -> None:
        self._model = model
        self._sentence = sentence
        self._device = device
        self._spans = Spans()
        for module in model.modules():
            setattr(module, _ATTRIBUTE, self._spans)

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        """One vector a text, little-endian float32."""
        vectors = self._vectors(texts).float().cpu().numpy().astype("<f4", copy=False)
        return [vector.tobytes() for vector in vectors]

    def warm_up(self, texts: Sequence[Sequence[int]]) -> None:
        """Encode the largest batch there can be.

        Raises:
            EngineFailed: a number is not finite.
        """
        if not all(np.isfinite(np.frombuffer(vector, "<f4")).all() for vector in self.encode(texts)):
            raise EngineFailed(
                "the warm-up pass gave vectors that are not finite: the weights are damaged, "
                "or engine.dtype cannot hold the model's values (bfloat16 and float32 have the range)"
            )

    def _vectors(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[B, hidden] of B texts."""
        lengths = [len(text) for text in texts]
        self._spans.ends = list(pairwise(accumulate(lengths, initial=0)))
        token_ids = torch.tensor([list(chain.from_iterable(texts))], device=self._device)  # [1, T]
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(self._device)
        hidden: Tensor = self._model(input_ids=token_ids, position_ids=positions).last_hidden_state[0]  # [T, hidden]
        means = torch.stack([hidden[begin:end].mean(0) for begin, end in self._spans.ends])
        return normalize(means, dim=1) if self._sentence.normalize else means


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it: query, key and value [1, H, T, D]; each text sees itself.

    Returns:
        [1, T, H, D], and None in place of the weights.
    """
    assert attention_mask is None, "a mask was built for an attention that knows no masks"
    assert dropout == 0.0, "the model is in training mode"
    spans: Spans = getattr(module, _ATTRIBUTE)
    parts = [
        scaled_dot_product_attention(
            query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end], scale=scaling
        )
        for begin, end in spans.ends
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _forward)
