"""What a model needs and we do not honour is refused by the feature's name and the key that asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_server.errors import InvalidConfiguration, ModelUnsupported
from paceline_server.model.support import context_length, require_supported

LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("change", "feature", "key"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "custom code", "auto_map"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized", "quantization_config"),
        ({"is_encoder_decoder": True, "model_type": "t5"}, "encoder-decoder", "is_encoder_decoder"),
        ({"vision_config": {"hidden_size": 8}, "model_type": "llava"}, "image input", "vision_config"),
        ({"final_logit_softcapping": 30.0, "model_type": "gemma2"}, "soft-capped logits", "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0, "model_type": "gemma2"}, "soft-capped scores", "attn_logit_softcapping"),
        ({"num_local_experts": 8, "model_type": "mixtral"}, "mixture of experts", "num_local_experts"),
        ({"kv_lora_rank": 512, "model_type": "deepseek_v2"}, "latent attention", "kv_lora_rank"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention", "layer_types"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic", "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope", "rope_parameters.rope_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate", "architectures"),
        ({"model_type": "gpt_oss"}, "attention sinks", "model_type"),
        ({"model_type": "brand_new"}, "supported are granite, llama", "model_type brand_new"),
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


def test_a_sliding_window_is_refused_unless_no_sequence_outgrows_it() -> None:
    windowed = LLAMA | {"sliding_window": 64}
    with pytest.raises(ModelUnsupported, match="at most 64"):
        context_length(windowed, None)
    assert context_length(windowed, 64) == 64


def test_a_window_that_no_layer_uses_does_not_matter() -> None:
    unused = LLAMA | {"sliding_window": 64, "layer_types": ["full_attention"] * 2}
    assert context_length(unused, None) == 256
    with pytest.raises(ModelUnsupported, match="sliding window"):
        context_length(unused | {"layer_types": ["full_attention", "sliding_attention"]}, None)
