"""Which models we serve: everything else is refused here, by the name of the feature and the key that asks for it.

Pure functions over a model's config.json; `loader` calls them before it reads a weight. A family is in `FAMILIES` when
a test holds its logits to transformers' own (tests/unit/test_model_families.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_server.errors import InvalidConfiguration, ModelUnsupported

FAMILIES = frozenset({"granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"})
"""Values of model_type that are served."""

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the length of what is being read."""

_FEATURES: tuple[tuple[str, str], ...] = (
    ("auto_map", "custom code from the model's folder (remove the key to use transformers' own classes)"),
    ("quantization_config", "a quantized checkpoint (use the original weights)"),
    ("is_encoder_decoder", "an encoder-decoder model"),
    ("vision_config", "image input"),
    ("audio_config", "audio input"),
    ("attn_logit_softcapping", "attention with soft-capped scores"),
    ("final_logit_softcapping", "soft-capped logits"),
    ("num_experts", "a mixture of experts"),
    ("num_local_experts", "a mixture of experts"),
    ("n_routed_experts", "a mixture of experts"),
    ("kv_lora_rank", "multi-head latent attention"),
    ("state_size", "a state-space model"),
)
"""Keys that a config sets (to something other than null, false or 0) when it needs what we do not have."""

_FAMILY_FEATURES = {"gpt_oss": "attention sinks", "mllama": "image input", "rwkv": "linear attention"}
"""Families whose feature no key names."""


def require_supported(config: Mapping[str, Any]) -> None:
    """Refuse what config.json asks for and we do not honour. Says nothing of the sliding window: see there.

    Raises:
        ModelUnsupported: with the feature and its key.
    """
    family = str(config.get("model_type"))
    for key, feature in _FEATURES:
        if config.get(key):
            raise ModelUnsupported(f"{feature} is not supported (config.json: {key}; model_type {family})")
    _require_full_attention(config, family)
    _require_static_rope(config)
    if family not in FAMILIES:
        feature = f": {_FAMILY_FEATURES[family]}" if family in _FAMILY_FEATURES else ""
        raise ModelUnsupported(
            f"model_type {family} is not supported{feature}; supported are {', '.join(sorted(FAMILIES))}"
        )
    architectures = config.get("architectures") or ()
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise ModelUnsupported(f"{architectures[0]} does not generate text (config.json: architectures)")


def context_length(config: Mapping[str, Any], configured: int | None) -> int:
    """Longest sequence in tokens: the configured one, or the model's own limit.

    Raises:
        InvalidConfiguration: more is configured than the model can do.
        ModelUnsupported: sequences of that length would need a sliding window.
    """
    limit = int(config["max_position_embeddings"])
    if configured is not None and configured > limit:
        raise InvalidConfiguration(
            f"engine.max_model_len: {configured} is more than the model's limit of {limit} tokens "
            "(config.json: max_position_embeddings)"
        )
    length = configured or limit
    window = sliding_window(config)
    if window is not None and window < length:
        raise ModelUnsupported(
            f"attention over a sliding window of {window} tokens is not supported (config.json: sliding_window); "
            f"set engine.max_model_len to at most {window} to serve the model without it"
        )
    return length


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Tokens that some layer looks back at most; None where every layer sees everything."""
    window = config.get("sliding_window")
    layer_types = config.get("layer_types")
    if window is None or (layer_types is not None and "sliding_attention" not in layer_types):
        return None
    return int(window)


def _require_full_attention(config: Mapping[str, Any], family: str) -> None:
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if others:
        raise ModelUnsupported(
            f"layers of {', '.join(others)} are not supported (config.json: layer_types; model_type {family})"
        )


def _require_static_rope(config: Mapping[str, Any]) -> None:
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in STATIC_ROPE_TYPES:
        raise ModelUnsupported(
            f"rotary embeddings of type {kind} are not supported: sequences of several lengths share a step "
            f"(config.json: {key}.rope_type)"
        )
