"""A config.json whose values cannot be is refused by its keys; nothing is computed, and no kernel called, from one."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from paceline_server.errors import ModelUnsupported
from paceline_server.model.config_file import complete, eos_token_ids
from paceline_server.model.fused_layers import FUSED_FAMILIES, decoder_shape, obstacle_to_fusing
from paceline_server.model.rotary import Rotary
from paceline_server.model.support import context_length, layer_windows
from paceline_server.model.testing import save_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
JUNK: tuple[Any, ...] = (0, -1, 1.5, inf, nan, "x", "1", True, False, None, [], [1], {}, {"a": "b"})


def use(folder: Path) -> None:
    """Compute from a configuration whatever a start does before it reads weights."""
    config = complete(folder)
    if obstacle_to_fusing(config) is not None:
        return  # to transformers, which asks for itself
    rotary = Rotary(config)
    shape = decoder_shape(config, rotary, "float32")
    assert 0 < rotary.elements <= shape.head_dim
    assert shape.heads % shape.kv_heads == 0
    assert len(layer_windows(config)) == config["num_hidden_layers"] > 0
    assert context_length(config, None) > 0
    assert all(type(token) is int and 0 <= token < shape.vocabulary for token in eos_token_ids(folder, config))


def write(folder: Path, said: Any, file: str = "config.json") -> None:
    (folder / file).write_text(said if isinstance(said, str) else json.dumps(said))


@pytest.mark.parametrize("family", sorted(FUSED_FAMILIES))
def test_whatever_a_value_is_a_model_is_used_or_refused_by_name(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    said = json.loads((tmp_path / "config.json").read_text())
    use(tmp_path)
    for key in said:
        for junk in JUNK:
            write(tmp_path, said | {key: junk})
            try:
                use(tmp_path)
            except ModelUnsupported:
                continue
            except Exception as error:
                raise AssertionError(f"{key}: {junk!r}") from error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_position_embeddings": 0}, "max_position_embeddings: Input should be greater than 0, not '0'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"vocab_size": "97", "hidden_size": -1}, "vocab_size.*hidden_size"),
        ({"rms_norm_eps": nan}, "rms_norm_eps"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, and num_hidden_layers is 3"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "rope_parameters.factor"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            r"rope_scaling.high_freq_factor: must be above low_freq_factor \(1\), not '1.0'",
        ),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 1e4, "low_freq_factor": 4.5}}, r"low_freq_factor \(4.5\)"),
        ({"rope_parameters": {"full_attention": LLAMA3 | {"low_freq_factor": 4}}}, "full_attention.high_freq_factor"),
        ({"rope_theta": 1.0}, "rope_theta: Input should be greater than 1"),
        ({"rope_local_base_freq": 0.5}, "rope_local_base_freq"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}}, "partial_rotary_factor"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()) | change)
    with pytest.raises(ModelUnsupported, match=says):
        complete(tmp_path)


@pytest.mark.parametrize("eos", ["2", True, -1, 97, 2.0, [2, "x"], {"2": 3}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_that_are_no_tokens_are_refused(eos: Any, file: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "generation_config.json").unlink()
    write(tmp_path, (said if file == "config.json" else {}) | {"eos_token_id": eos}, file)
    with pytest.raises(ModelUnsupported, match="eos_token_id"):
        eos_token_ids(tmp_path, complete(tmp_path))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "7", "[" * 9_999, "\ufeff{}"], ids=lambda text: text[:9])
def test_a_file_that_is_no_object_is_refused_by_its_name(text: str, file: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    write(tmp_path, text, file)
    with pytest.raises(ModelUnsupported, match=f"{tmp_path}/{file}"):
        eos_token_ids(tmp_path, complete(tmp_path))
