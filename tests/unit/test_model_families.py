"""Every family that we serve gives transformers' own logits, in chunks, several sequences a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.errors import ModelUnsupported
from paceline_server.model.fused_layers import FUSED_FAMILIES
from paceline_server.model.startup import load
from paceline_server.model.support import FAMILIES
from paceline_server.model.testing import save_tiny_model, tiny_config

_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biased, more heads": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
    ),
    "llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, yarn rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window in its last layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with a window in every second layer": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": _ALTERNATING},
    ),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0}),
    "gemma2, soft-capped logits": ("gemma2", {"sliding_window": 9, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 4, "sliding_window": 6, "sliding_window_pattern": 2, "final_logit_softcapping": 9.0},
    ),
    "granite": (
        "granite",
        {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 with a window and partial rotation": ("phi3", {"sliding_window": 7, "partial_rotary_factor": 0.5}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "mixtral with a window": ("mixtral", {"num_local_experts": 4, "sliding_window": 6}),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen2_moe with a window in every second layer": (
        "qwen2_moe",
        _EXPERTS | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    ),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe with a window and a dense layer": (
        "qwen3_moe",
        _EXPERTS | {"use_sliding_window": True, "sliding_window": 6, "mlp_only_layers": [1]},
    ),
}

FUSED = [variant for variant, (family, _) in VARIANTS.items() if family in FUSED_FAMILIES]

CUTS = ([10, 17, 22, 23], [1, 2, 30], [5, 6, 7, 8])
"""Where each sequence's slices end, step by step; the last entry is the sequence's length."""


def test_every_family_in_the_list_has_a_variant_here() -> None:
    assert {family for family, _ in VARIANTS.values()} == FAMILIES


@pytest.mark.parametrize(
    ("variant", "backend"),
    [(one, "reference") for one in VARIANTS] + [(one, "cpu") for one in FUSED] + [("gemma2", "triton")],
)
def test_chunks_of_several_sequences_give_transformers_own_logits(variant: str, backend: str, tmp_path: Path) -> None:
    family, settings = VARIANTS[variant]
    save_tiny_model(tmp_path, family, **settings)
    loaded = load(tiny_config(tmp_path, engine={"attention_backend": backend}), lambda _: None)
    torch.manual_seed(3)
    sequences = [torch.randint(3, 97, (cuts[-1],)).tolist() for cuts in CUTS]
    expected = transformers_logits(tmp_path, sequences)
    assert max(logits.std() for logits in expected) > 0.1, "flat logits would hide a wrong attention"
    tables = [list(range(index, 60, 3)) for index in range(3)]  # interleaved blocks
    for step in range(4):
        slices, rows = [], []
        for index, cuts in enumerate(CUTS):
            if step < len(cuts):
                begin = 0 if step == 0 else cuts[step - 1]
                slices.append(
                    SequenceSlice(sequences[index][begin : cuts[step]], begin, tables[index], SamplingParams())
                )
                rows.append(expected[index][cuts[step] - 1])
        logits = torch.as_tensor(loaded.runner.logits(StepBatch(slices)))
        torch.testing.assert_close(logits, torch.stack(rows), rtol=1e-3, atol=1e-4)


def transformers_logits(folder: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Logits [L, vocabulary] of each sequence alone, by transformers without any of our code."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([tokens])).logits[0] for tokens in sequences]


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"sliding_window": 16}, "sliding_window"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "soft-capped scores"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "later tokens"),
        ("gpt2", {}, "model_type gpt2"),
    ],
)
def test_a_family_that_needs_more_is_refused_before_its_weights_are_read(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, family, **settings)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelUnsupported, match=message):
        load(tiny_config(tmp_path), lambda _: None)
