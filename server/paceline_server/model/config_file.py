"""A model's config.json, completed: with the defaults of its family, in the form that the rest reads.

Transformers knows every family's defaults and every older way to write them, but it takes seconds to import, and brings
torch along. So a file that says all there is to say is read here, and transformers is asked about the others:
`complete` is the one way to a configuration. tests/unit/test_model_config.py holds the two to each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline_server.errors import ModelUnsupported
from paceline_server.model.config_values import EndTokens, require_values
from paceline_server.model.support import STATIC_ROPE_TYPES, require_supported

Config = dict[str, Any]

_COUNTS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings"
).split()

_SAID_BY_ALL = (*_COUNTS, "rms_norm_eps", "eos_token_id")
_SAID: dict[str, tuple[str, ...]] = {
    "gemma2": (
        "head_dim", "hidden_activation", "layer_types", "sliding_window", "query_pre_attn_scalar",
        "attn_logit_softcapping", "final_logit_softcapping",
    ),
    "gemma3_text": ("head_dim", "hidden_activation", "layer_types", "sliding_window", "query_pre_attn_scalar"),
    "granite": (
        "hidden_act", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
    ),
    "llama": ("hidden_act",),
    "mistral": ("hidden_act", "sliding_window"),
    "olmo2": ("hidden_act",),
    "phi3": ("hidden_act", "sliding_window"),
    "qwen2": ("hidden_act", "use_sliding_window"),
    "qwen3": ("hidden_act", "use_sliding_window", "head_dim"),
}  # fmt: skip
"""What a file of a family must say to be read here: whatever has a default that is a number of that family's own."""

_MAY_BE_NULL = frozenset({"attn_logit_softcapping", "eos_token_id", "final_logit_softcapping", "sliding_window"})

_TIED = frozenset({"gemma2", "gemma3_text"})
"""Families whose head is their embedding, unless they say otherwise."""

_ROPE_BY_KIND = frozenset({"gemma3_text"})
"""Families whose kinds of layers turn by tables of their own."""


def read(folder: Path, require: Callable[[Mapping[str, Any]], None] = require_supported) -> Config:
    """What the file says, and nothing else.

    Args:
        require: raises ModelUnsupported for what we do not honour.

    Raises:
        ModelUnsupported: it asks for something that we do not honour, or it cannot be understood.
    """
    said = _object(folder / "config.json")
    require_values(said)
    require(said)
    return said


def complete(folder: Path) -> Config:
    """The configuration of a decoder with all that it means.

    Raises:
        ModelUnsupported: it asks for something that we do not honour, or it cannot be understood.
    """
    said = read(folder)
    config = completed(said)
    if config is None:
        from paceline_server.model.loader import read_config  # noqa: PLC0415 (it brings transformers and torch)

        config = read_config(folder).to_dict()
    require_supported(config)  # again, with the defaults of the family
    return config


def completed(said: Mapping[str, Any]) -> Config | None:
    """A file's content with what is left out of it; None where only transformers knows that."""
    family = said.get("model_type")
    needed = (*_SAID_BY_ALL, *_SAID.get(str(family), ()))
    if family not in _SAID or any(
        said.get(key) is None and (key not in said or key not in _MAY_BE_NULL) for key in needed
    ):
        return None
    windows = bool(said.get("sliding_window")) and said.get("use_sliding_window", True)
    if windows and family.startswith("qwen") and "layer_types" not in said:
        return None
    rope = _rope_by_kind(said) if family in _ROPE_BY_KIND else _rope(said)
    if family == "phi3" and rope is not None and rope["rope_type"] != "default":
        return None
    if rope is None or said["hidden_size"] % said["num_attention_heads"]:
        return None
    defaults = {"tie_word_embeddings": family in _TIED, "attention_bias": False, "mlp_bias": False}
    return {
        **defaults,
        **said,
        "head_dim": said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"],
        "sliding_window": said["sliding_window"] if windows else None,
        "rope_parameters": rope,
        "dtype": said.get("dtype") or said.get("torch_dtype"),
    }


def _rope(said: Mapping[str, Any]) -> Config | None:
    parameters = {key: said[key] for key in ("rope_theta", "partial_rotary_factor") if said.get(key) is not None}
    parameters |= said.get("rope_scaling") or said.get("rope_parameters") or {}
    return _whole(parameters)


def _rope_by_kind(said: Mapping[str, Any]) -> Config | None:
    """Gemma 3: `rope_theta` and `rope_scaling` are of full attention in older files."""
    given = said.get("rope_parameters") or {
        "full_attention": {"rope_theta": said.get("rope_theta"), **(said.get("rope_scaling") or {})},
        "sliding_attention": {"rope_theta": said.get("rope_local_base_freq")},
    }
    each = {kind: _whole(dict(given.get(kind) or {})) for kind in ("full_attention", "sliding_attention")}
    return each if all(each.values()) else None


def _whole(parameters: Config) -> Config | None:
    """Parameters of one table, if nothing is left out that its type needs."""
    parameters["rope_type"] = kind = parameters.get("rope_type") or parameters.get("type") or "default"
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    if kind not in STATIC_ROPE_TYPES or not parameters.get("rope_theta"):
        return None
    return parameters if all(parameters.get(key) for key in needed[kind]) else None


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a sequence: those of generation_config.json, else of config.json.

    Raises:
        ModelUnsupported: they are no tokens of the vocabulary, or the file cannot be understood.
    """
    path = folder / "generation_config.json"
    generation = _object(path) if path.is_file() else {}
    require_values(generation, EndTokens, path.name)
    eos = generation.get("eos_token_id", config["eos_token_id"])
    found = (eos,) if isinstance(eos, int) else tuple(eos or ())
    if beyond := [token for token in found if token >= config["vocab_size"]]:
        raise ModelUnsupported(
            f"eos_token_id: {beyond[0]} is not in the vocabulary of {config['vocab_size']} tokens "
            f"({folder}: generation_config.json, config.json)"
        )
    return found


def _object(path: Path) -> Config:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnsupported(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelUnsupported(f"{path} is not a JSON object")
    return content
