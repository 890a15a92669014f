"""Joins an attention back end to a transformers model, through transformers' AttentionInterface.

The model is built with our name as its attention implementation. No mask function goes by that name, so transformers
builds no mask; each attention module finds its own `LayerAttention` as an attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from paceline_server.errors import ModelUnsupported
from paceline_server.model.attention.interface import PagedAttention, ScoreRule

IMPLEMENTATION = "paceline_paged"
"""Our name in transformers' registry of attention functions."""

_ATTRIBUTE = "paceline_attention"

_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "is_causal"})
"""Arguments of an attention call that change nothing here."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one attention module needs.

    Attributes:
        window: keys that a row sees at most, or None. From the model's configuration, because some attention modules
            (Qwen2-MoE) leave it to their mask and do not pass it on.
    """

    backend: PagedAttention
    layer: int
    window: int | None


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a decoder, by layer.

    Raises:
        ModelUnsupported: some layer has none of the usual kind, so its attention would bypass the cache.
    """
    found = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]
    layers = [module.layer_idx for module in found]
    config: Any = model.config
    expected = list(range(int(config.num_hidden_layers)))
    if layers != expected:
        raise ModelUnsupported(f"{type(model).__name__} has attention in layers {layers}, not in all {len(expected)}")
    return found


def attach(model: nn.Module, backend: PagedAttention, windows: Sequence[int | None]) -> None:
    """Give every attention module of a model its place in a back end; `windows` by layer."""
    for layer, (module, window) in enumerate(zip(attention_modules(model), windows, strict=True)):
        setattr(module, _ATTRIBUTE, LayerAttention(backend, layer, window))


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it: query [1, H, T, D], key and value [1, K, T, D].

    Returns:
        [1, T, H, D], and None in place of the weights.
    """
    place: LayerAttention = getattr(module, _ATTRIBUTE)
    assert attention_mask is None, "a mask was built for an attention that knows no masks"
    assert dropout == 0.0, "the model is in training mode"
    assert sliding_window in (None, place.window), "the configuration says otherwise"
    for name, argument in others.items():
        if argument is not None and name not in _HARMLESS:
            raise ModelUnsupported(f"attention with {name} is not supported ({type(module).__name__})")
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    rule = ScoreRule(scaling, place.window, softcap)
    return place.backend.forward(place.layer, packed[0], packed[1], packed[2], rule)[None], None


AttentionInterface.register(IMPLEMENTATION, _forward)
