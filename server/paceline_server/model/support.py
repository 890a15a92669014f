"""Which models we serve: everything else is refused here, by the name of the feature and the key that asks for it.

Pure functions over a model's config.json; `loader` calls them before it reads a weight. A family is in `FAMILIES` when
a test holds its logits to transformers' own (tests/unit/test_model_families.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_server.errors import InvalidConfiguration, ModelUnsupported

FAMILIES = frozenset(
    "gemma2 gemma3_text granite llama mistral mixtral olmo2 phi3 qwen2 qwen2_moe qwen3 qwen3_moe".split()
)
"""Values of model_type that are served."""

_WINDOW_EVERYWHERE = frozenset({"mistral", "mixtral", "phi3", "qwen3_moe"})
"""Families whose sliding_window holds for all layers, whatever layer_types says."""

_WINDOW_BY_LAYER = frozenset({"gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3"})
"""Families whose sliding_window holds for the layers that layer_types calls sliding_attention."""

_SOFTCAPPED = frozenset({"gemma2", "gemma3_text"})
"""Families whose logits may be soft-capped."""

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the length of what is being read."""

_FEATURES: tuple[tuple[str, str], ...] = (
    ("auto_map", "custom code from the model's folder (remove the key to use transformers' own classes)"),
    ("quantization_config", "a quantized checkpoint (use the original weights)"),
    ("is_encoder_decoder", "an encoder-decoder model"),
    ("vision_config", "image input"),
    ("audio_config", "audio input"),
    ("use_bidirectional_attention", "attention to later tokens"),
    ("n_routed_experts", "a mixture of experts with expert groups"),
    ("kv_lora_rank", "multi-head latent attention"),
    ("state_size", "a state-space model"),
)
"""Keys that a config sets (to something other than null, false or 0) when it needs what we do not have."""

_FAMILY_FEATURES = {"gpt_oss": "attention sinks", "mllama": "image input", "rwkv": "linear attention"}
"""Families whose feature no key names."""


def require_supported(config: Mapping[str, Any]) -> None:
    """Refuse what config.json asks for and we do not honour.

    Raises:
        ModelUnsupported: with the feature and its key.
    """
    family = str(config.get("model_type"))
    for key, feature in _FEATURES:
        if config.get(key):
            raise ModelUnsupported(f"{feature} is not supported (config.json: {key}; model_type {family})")
    _require_usual_layers(config, family)
    _require_usual_window(config, family)
    _require_softcap_of_the_family(config, family)
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
    """
    limit = int(config["max_position_embeddings"])
    if configured is not None and configured > limit:
        raise InvalidConfiguration(
            f"engine.max_model_len: {configured} is more than the model's limit of {limit} tokens "
            "(config.json: max_position_embeddings)"
        )
    return configured or limit


def layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Keys that a row of each layer sees at most, its own included; None is all.

    Args:
        config: with the family's defaults, past `require_supported`.
    """
    window = config.get("sliding_window")
    if not window:
        return (None,) * int(config["num_hidden_layers"])
    if config["model_type"] in _WINDOW_EVERYWHERE:
        return (int(window),) * int(config["num_hidden_layers"])
    return tuple(int(window) if kind == "sliding_attention" else None for kind in config["layer_types"])


def _require_usual_window(config: Mapping[str, Any], family: str) -> None:
    """Refuse windows that transformers, and so we, would ignore."""
    kinds = set(config.get("layer_types") or ())
    known = family in _WINDOW_BY_LAYER or (family in _WINDOW_EVERYWHERE and kinds <= {"sliding_attention"})
    if config.get("sliding_window") and not known:
        raise ModelUnsupported(
            f"a sliding window is not supported in this form (config.json: sliding_window, layer_types; model_type "
            f"{family}); remove the keys if the model was trained without"
        )


def _require_softcap_of_the_family(config: Mapping[str, Any], family: str) -> None:
    if config.get("attn_logit_softcapping") and family != "gemma2":
        raise ModelUnsupported(
            "attention with soft-capped scores is not supported "
            f"(config.json: attn_logit_softcapping; model_type {family})"
        )
    if config.get("final_logit_softcapping") and family not in _SOFTCAPPED:
        raise ModelUnsupported(
            f"soft-capped logits are not supported (config.json: final_logit_softcapping; model_type {family})"
        )


def _require_usual_layers(config: Mapping[str, Any], family: str) -> None:
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if others:
        raise ModelUnsupported(
            f"layers of {', '.join(others)} are not supported (config.json: layer_types; model_type {family})"
        )


def _require_static_rope(config: Mapping[str, Any]) -> None:
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    by_layer = {f"{key}.{name}": value for name, value in rope.items() if isinstance(value, Mapping)}  # Gemma 3
    for path, parameters in (by_layer or {key: rope}).items():
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in STATIC_ROPE_TYPES:
            raise ModelUnsupported(
                f"rotary embeddings of type {kind} are not supported: sequences of several lengths share a step "
                f"(config.json: {path}.rope_type)"
            )
