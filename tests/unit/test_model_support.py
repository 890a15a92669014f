"""What a model needs and we do not honour is refused by the feature's name and the key that asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_server.errors import InvalidConfiguration, ModelUnsupported
from paceline_server.model.support import context_length, layer_windows, require_supported

LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("change", "feature", "key"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "custom code", "auto_map"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized", "quantization_config"),
        ({"is_encoder_decoder": True, "model_type": "t5"}, "encoder-decoder", "is_encoder_decoder"),
        ({"vision_config": {"hidden_size": 8}, "model_type": "llava"}, "image input", "vision_config"),
        ({"final_logit_softcapping": 30.0}, "soft-capped logits", "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "soft-capped scores", "attn_logit_softcapping"),
        ({"n_routed_experts": 8, "model_type": "glm4_moe"}, "mixture of experts", "n_routed_experts"),
        ({"kv_lora_rank": 512, "model_type": "deepseek_v2"}, "latent attention", "kv_lora_rank"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention", "layer_types"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic", "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope", "rope_parameters.rope_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate", "architectures"),
        ({"model_type": "gpt_oss"}, "attention sinks", "model_type"),
        ({"model_type": "brand_new"}, "supported are gemma2, gemma3_text, granite, llama", "model_type brand_new"),
    ],
)
def test_an_unsupported_feature_is_refused_with_its_name_and_key(
    change: dict[str, Any], feature: str, key: str
) -> None:
    require_supported(LLAMA)
    with pytest.raises(ModelUnsupported) as refusal:
        require_supported(LLAMA | change)
    assert feature in str(refusal.value)
    assert key in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": None, "num_experts": 0, "auto_map": {}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"layer_types": ["full_attention", "full_attention"]},
        {"architectures": None},
    ],
)
def test_a_key_that_asks_for_nothing_special_is_no_reason_to_refuse(change: dict[str, Any]) -> None:
    require_supported(LLAMA | change)


def test_the_context_is_the_models_unless_less_is_configured() -> None:
    assert context_length(LLAMA, None) == 256
    assert context_length(LLAMA, 100) == 100
    assert context_length(LLAMA, 256) == 256


def test_a_longer_context_than_the_models_is_a_configuration_mistake() -> None:
    with pytest.raises(InvalidConfiguration, match=r"engine.max_model_len: 257 .* 256"):
        context_length(LLAMA, 257)


@pytest.mark.parametrize(
    ("family", "change", "windows"),
    [
        ("llama", {}, (None, None, None)),
        ("mistral", {"sliding_window": 64}, (64, 64, 64)),
        ("qwen2", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, (None, None, None)),
        ("qwen2_moe", {"sliding_window": 0, "layer_types": ["full_attention"] * 3}, (None, None, None)),
        ("gemma2", {"sliding_window": 64, "layer_types": ALTERNATING}, (64, None, 64)),
    ],
)
def test_a_window_holds_for_the_layers_for_which_the_family_means_it(
    family: str, change: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = LLAMA | {"model_type": family, "num_hidden_layers": 3} | change
    require_supported(config)
    assert layer_windows(config) == windows


@pytest.mark.parametrize("change", [{}, {"model_type": "mistral", "layer_types": ALTERNATING}])
def test_a_window_that_transformers_would_ignore_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelUnsupported, match="sliding_window, layer_types"):
        require_supported(LLAMA | {"sliding_window": 64} | change)


def test_the_rotary_embeddings_of_every_kind_of_layer_are_looked_at() -> None:
    rope = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ModelUnsupported, match=r"rope_parameters.full_attention.rope_type"):
        require_supported(LLAMA | {"model_type": "gemma3_text", "rope_parameters": rope})
