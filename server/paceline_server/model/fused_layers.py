"""A Llama-like decoder as its checkpoint holds it: its sizes and its layers' tensors, as the C++ kernels name them.

`fused_decoder` packs what is found here. Whatever a family does differently from Llama is told here, by the names that
its tensors have in a file and by its configuration; tests/unit/test_model_families.py holds every family to
transformers' own logits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline_server.errors import ModelUnsupported
from paceline_server.model.checkpoint import Checkpoint
from paceline_server.model.formats import Numbers, narrowed, widened
from paceline_server.model.native import DecoderShape
from paceline_server.model.rotary import Rotary
from paceline_server.model.rotation import Weights

FUSED_FAMILIES = frozenset({"gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"})
"""Values of model_type whose layers are built as the kernels' decoder."""

_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}

_GEMMA = frozenset({"gemma2", "gemma3_text"})
"""Families that scale their embeddings, and store a norm's weight as its difference from one."""

_JOINED = frozenset({"phi3"})
"""Families whose projections of a kind are one tensor."""

_ATTENTION_BIAS = frozenset({"gemma2", "gemma3_text", "granite", "llama", "olmo2", "qwen3"})
_MLP_BIAS = frozenset({"granite", "llama"})
"""Families whose configuration says whether there are biases."""

_HEAD_NORMS = frozenset({"gemma3_text", "olmo2", "qwen3"})
_WHOLE_ROW_NORMS = frozenset({"olmo2"})
"""Families with norms of queries and keys; those whose norms span all heads."""

_NORMS_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_NORMS_AFTER = {"attention_after_norm": "post_attention_layernorm", "mlp_after_norm": "post_feedforward_layernorm"}
_NORMS_AROUND = _NORMS_AFTER | {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
_NORMS = {"olmo2": _NORMS_AFTER, "gemma2": _NORMS_AROUND, "gemma3_text": _NORMS_AROUND}
"""A layer's norms of its rows, by our names; of families that are not here as Llama's."""

_NAMED_IN_ERRORS = 3
_COMPUTED = ".rotary_emb.inv_freq"  # some older files hold what the configuration says as well

log = logging.getLogger("paceline.model")


def obstacle_to_fusing(config: Mapping[str, Any]) -> str | None:
    """Why a model of this configuration is none that we fuse; None where it is one."""
    if config["model_type"] not in FUSED_FAMILIES:
        return f"does not do model_type {config['model_type']}, only {', '.join(sorted(FUSED_FAMILIES))}"
    if _activation(config) not in _ACTIVATIONS:
        return f"does not do {_activation(config)} in the MLP, only {' and '.join(_ACTIVATIONS)}"
    return None


def norms_follow(config: Mapping[str, Any]) -> bool:
    """Whether results go through a norm on their way back to the residual stream."""
    return config["model_type"] in _NORMS


def decoder_shape(config: Mapping[str, Any], rotary: Rotary, dtype: str) -> DecoderShape:
    """Sizes and factors; the number formats of the weights are left to be set.

    Args:
        config: complete, see `config_file`.
        dtype: of the weights; Gemma rounds a factor to it.
    """
    family, head_dim = config["model_type"], head_size(config)
    return DecoderShape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=kv_heads(config),
        head_dim=head_dim,
        rotary=rotary.elements,
        vocabulary=config["vocab_size"],
        norm_whole_rows=int(family in _WHOLE_ROW_NORMS),
        gelu=_ACTIVATIONS[_activation(config)],
        down_factor=1,
        epsilon=float(config["rms_norm_eps"]),
        attention_scale=_attention_scale(config, head_dim),
        attention_softcap=float(config.get("attn_logit_softcapping") or 0.0),
        embedding_scale=_embedding_scale(config, dtype),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        logits_scale=1.0 / config.get("logits_scaling", 1.0),
        logits_softcap=float(config.get("final_logit_softcapping") or 0.0),
    )


def head_size(config: Mapping[str, Any]) -> int:
    """Elements of a head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def kv_heads(config: Mapping[str, Any]) -> int:
    """Key/value heads of a layer."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the checkpoint: some rows of one that may hold others too."""

    name: str
    shape: tuple[int, ...]
    begin: int = 0
    rows: int | None = None


class LayerReader:
    """The tensors of a decoder, out of its checkpoint.

    Args:
        checkpoint: open.
        config: complete, see `config_file`.
        dtype: float32 or bfloat16, of the weights in memory.

    Raises:
        ModelUnsupported: checkpoint and configuration do not go together; some of the tensors are named.
    """

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: str) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._family = str(config["model_type"])
        # The decoder alone, saved without its head, lacks the first part of the names.
        self._prefix = "model." if "model.norm.weight" in checkpoint or "norm.weight" not in checkpoint else ""
        self._require_all()

    def embedding(self) -> Numbers:
        """[vocabulary, hidden]."""
        return self._read(self._embedding_place())

    def head(self) -> Numbers:
        """[vocabulary, hidden]; the embedding where they are one."""
        return self._read(self._head_place())

    def final_norm(self) -> Numbers:
        """[hidden]."""
        return self._norm(self._final_norm_place())

    def layer(self, index: int) -> Weights:
        """The tensors of one layer by the names of `native.LayerSource`."""
        weights: Weights = {name: self._read(place) for name, place in self._layer_places(index).items()}
        return weights | {name: self._norm(place) for name, place in self._norm_places(index).items()}

    def _require_all(self) -> None:
        places = [self._embedding_place(), self._head_place(), self._final_norm_place()]
        for index in range(self._config["num_hidden_layers"]):
            places += [*self._layer_places(index).values(), *self._norm_places(index).values()]
        missing = [place.name for place in places if place.name not in self._checkpoint]
        there = [place for place in places if place.name in self._checkpoint]
        mismatched = [place.name for place in there if self._checkpoint.shape(place.name) != place.shape]
        wrong = {"missing keys": missing, "mismatched keys": mismatched}
        if missing or mismatched:
            parts = [f"{key}: {', '.join(sorted(names)[:_NAMED_IN_ERRORS])}" for key, names in wrong.items() if names]
            raise ModelUnsupported(
                f"the weights of {self._checkpoint.folder} do not go with its config.json: {'; '.join(parts)}"
            )
        note_unused(self._checkpoint.folder, set(self._checkpoint) - {place.name for place in places})

    def _embedding_place(self) -> _Place:
        return self._tied(f"{self._prefix}embed_tokens.weight", "lm_head.weight")

    def _head_place(self) -> _Place:
        return self._tied("lm_head.weight", f"{self._prefix}embed_tokens.weight")

    def _tied(self, own: str, other: str) -> _Place:
        """Embedding and head where they may be one: whichever of the two is stored."""
        borrowed = self._config["tie_word_embeddings"] and own not in self._checkpoint and other in self._checkpoint
        return _Place(other if borrowed else own, (self._config["vocab_size"], self._config["hidden_size"]))

    def _final_norm_place(self) -> _Place:
        return _Place(f"{self._prefix}norm.weight", (self._config["hidden_size"],))

    def _layer_places(self, index: int) -> dict[str, _Place]:
        """All but the norms."""
        config, family = self._config, self._family
        hidden, inner, dim = config["hidden_size"], config["intermediate_size"], head_size(config)
        query, key = config["num_attention_heads"] * dim, kv_heads(config) * dim
        attention, mlp = (f"{self._prefix}layers.{index}.{part}" for part in ("self_attn", "mlp"))
        places = _linear("output", f"{attention}.o_proj", hidden, query) | _linear(
            "down", f"{mlp}.down_proj", hidden, inner
        )
        if family in _JOINED:
            places |= _joined(f"{attention}.qkv_proj", {"query": query, "key": key, "value": key}, hidden)
            return places | _joined(f"{mlp}.gate_up_proj", {"gate": inner, "up": inner}, hidden)
        projections = {"query": ("q_proj", query), "key": ("k_proj", key), "value": ("v_proj", key)}
        for name, (stored, outputs) in projections.items():
            places |= _linear(name, f"{attention}.{stored}", outputs, hidden)
        for name, stored in (("gate", "gate_proj"), ("up", "up_proj")):
            places |= _linear(name, f"{mlp}.{stored}", inner, hidden)
        biased = {f"{name}_bias": _bias_of(places[name]) for name in self._biased()}
        return places | biased

    def _biased(self) -> list[str]:
        """Our names of the linear layers that have a bias."""
        biased = ["query", "key", "value"] if self._family == "qwen2" else []
        if self._family in _ATTENTION_BIAS and self._config.get("attention_bias"):
            biased += ["query", "key", "value", "output"]
        if self._family in _MLP_BIAS and self._config.get("mlp_bias"):
            biased += ["gate", "up", "down"]
        return biased

    def _norm_places(self, index: int) -> dict[str, _Place]:
        layer, dim = f"{self._prefix}layers.{index}", head_size(self._config)
        hidden = (self._config["hidden_size"],)
        names = _NORMS.get(self._family, _NORMS_BEFORE)
        places = {name: _Place(f"{layer}.{stored}.weight", hidden) for name, stored in names.items()}
        if self._family in _HEAD_NORMS:
            whole = self._family in _WHOLE_ROW_NORMS
            for name, stored, heads in (
                ("query_norm", "q_norm", self._config["num_attention_heads"]),
                ("key_norm", "k_norm", kv_heads(self._config)),
            ):
                places[name] = _Place(f"{layer}.self_attn.{stored}.weight", (heads * dim if whole else dim,))
        return places

    def _read(self, place: _Place) -> Numbers:
        whole = self._checkpoint.read(place.name, self._dtype)
        return whole if place.rows is None else whole[place.begin : place.begin + place.rows]

    def _norm(self, place: _Place) -> Numbers:
        """What a norm multiplies its rows with."""
        stored = self._read(place)
        return widened(stored) + np.float32(1.0) if self._family in _GEMMA else stored


def _linear(name: str, stored: str, outputs: int, inputs: int) -> dict[str, _Place]:
    return {name: _Place(f"{stored}.weight", (outputs, inputs))}


def note_unused(folder: Path, names: Iterable[str]) -> None:
    """Say which tensors of a folder nothing is computed from: whoever wrote them meant another configuration."""
    unused = sorted(name for name in names if not name.endswith(_COMPUTED))
    if unused:
        log.warning(
            "%s holds %d tensors for which its config.json has no use, and the model is computed without them: %s%s",
            folder,
            len(unused),
            ", ".join(unused[:_NAMED_IN_ERRORS]),
            ", …" if len(unused) > _NAMED_IN_ERRORS else "",
        )


def _joined(stored: str, outputs: Mapping[str, int], inputs: int) -> dict[str, _Place]:
    """Linear layers one under the other in a single tensor."""
    places, begin = {}, 0
    for name, rows in outputs.items():
        places[name] = _Place(f"{stored}.weight", (sum(outputs.values()), inputs), begin, rows)
        begin += rows
    return places


def _bias_of(place: _Place) -> _Place:
    return _Place(f"{place.name.removesuffix('weight')}bias", place.shape[:1])


def _activation(config: Mapping[str, Any]) -> str:
    return str(config.get("hidden_activation") or config.get("hidden_act"))


def _attention_scale(config: Mapping[str, Any], head_dim: int) -> float:
    if config["model_type"] == "granite":
        return float(config["attention_multiplier"])
    scored = config["query_pre_attn_scalar"] if config["model_type"] in _GEMMA else head_dim
    return 1.0 / math.sqrt(scored)


def _embedding_scale(config: Mapping[str, Any], dtype: str) -> float:
    if config["model_type"] not in _GEMMA:
        return float(config.get("embedding_multiplier", 1.0))
    root = np.array([config["hidden_size"] ** 0.5], dtype=np.float32)
    return float(root[0] if dtype == "float32" else widened(narrowed(root))[0])
