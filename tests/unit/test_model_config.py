"""config.json read by ourselves means what transformers reads in it, and what only transformers knows is left to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline_server.model.config_file import complete, completed, eos_token_ids
from paceline_server.model.fused_layers import FUSED_FAMILIES
from paceline_server.model.rotary import Rotary
from paceline_server.model.support import layer_windows
from paceline_server.model.testing import save_tiny_model

READ = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings rms_norm_eps eos_token_id tie_word_embeddings dtype"
).split()
"""Keys that every family has; the others are seen in its logits (test_model_families.py)."""

LINEAR = {"type": "linear", "factor": 2.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", sorted(FUSED_FAMILIES))
def test_a_file_of_every_family_is_read_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    own = completed(json.loads((tmp_path / "config.json").read_text()))
    assert own is not None, "what transformers writes says all that there is to say"
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {key: own[key] for key in READ} == {key: theirs[key] for key in READ}
    assert layer_windows(own) == layer_windows(theirs)
    assert own["rope_parameters"] == theirs["rope_parameters"]


@pytest.mark.parametrize(
    ("family", "older"),
    [
        ("llama", {"rope_theta": 500.0, "rope_scaling": LINEAR}),
        ("llama", {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
        ("phi3", {"rope_theta": 500.0, "rope_scaling": None, "partial_rotary_factor": 0.5}),
        ("gemma3_text", {"rope_theta": 5e4, "rope_local_base_freq": 1e3, "rope_scaling": LINEAR}),
    ],
)
def test_the_older_way_to_write_rotary_embeddings_gives_the_same_tables(
    family: str, older: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, family)
    said = json.loads((tmp_path / "config.json").read_text())
    del said["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(said | older))
    own = completed(said | older)
    assert own is not None
    assert_same_tables(own, AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
    ],
    ids=lambda parameters: " ".join(map(str, parameters.values())),
)
def test_frequencies_of_every_type_are_transformers_own(parameters: dict[str, Any], tmp_path: Path) -> None:
    save_tiny_model(tmp_path, head_dim=16, rope_parameters={"rope_theta": 10000.0, **parameters})
    assert_same_tables(complete(tmp_path), AutoConfig.from_pretrained(tmp_path))


def assert_same_tables(own: dict[str, Any], theirs: Any) -> None:
    rotary, module = Rotary(own), AutoModelForCausalLM.from_config(theirs).model.rotary_emb
    positions = np.array([0, 1, 7, 100, 255])
    kinds = sorted(set(theirs.layer_types)) if "rope_theta" not in own["rope_parameters"] else [None]
    cosine, sine = rotary.tables(positions)
    for index, kind in enumerate(kinds):
        like, places = torch.empty(0), torch.from_numpy(positions)[None]
        expected = module(like, places, kind) if kind else module(like, places)
        np.testing.assert_allclose(cosine[index], expected[0][0].numpy(), rtol=0, atol=2e-5)
        np.testing.assert_allclose(sine[index], expected[1][0].numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("left_out", ["num_key_value_heads", "rms_norm_eps", "hidden_act", "rope_parameters"])
def test_what_a_file_leaves_out_is_asked_of_transformers(left_out: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    del said[left_out]
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert completed(said) is None
    assert complete(tmp_path)[left_out] == getattr(AutoConfig.from_pretrained(tmp_path), left_out)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, {"eos_token_id": 2, "vocab_size": 10}) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert eos_token_ids(tmp_path, {"eos_token_id": 2, "vocab_size": 10}) == (2, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_token_ids(tmp_path, {"eos_token_id": 2, "vocab_size": 10}) == ()
