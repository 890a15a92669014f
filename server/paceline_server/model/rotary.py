"""Rotary embeddings: by how much each pair of a head's elements turns from one position to the next.

The formulas are transformers' (modeling_rope_utils.py), for the types whose frequencies do not depend on the length of
what is being read (`support.STATIC_ROPE_TYPES`); tests/unit/test_model_families.py holds them to it.
`fused_decoder` asks for the tables of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_server.model.formats import Floats

_PARTIAL = frozenset({"phi3"})
"""Families that heed `partial_rotary_factor` where the frequencies are the plain ones."""

_FAST, _SLOW = 32, 1
"""YaRN's defaults: turns within the original context beyond which, and below which, a frequency is one or the other."""


class Rotary:
    """The tables of a model, one for each kind of layer that turns by its own, else one for all.

    Args:
        config: complete, see `config_file`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        parameters = config["rope_parameters"]
        self._kinds = sorted(set(config["layer_types"])) if "rope_theta" not in parameters else []
        each = [parameters[kind] for kind in self._kinds] or [parameters]
        self._turns = [_turns(one, config) for one in each]

    @property
    def elements(self) -> int:
        """Elements of a head that turn, from the first."""
        return 2 * len(self._turns[0][0])

    def table_of(self, layer_kind: str) -> int:
        """Which table a layer of this kind turns by."""
        return self._kinds.index(layer_kind) if self._kinds else 0

    def tables(self, positions: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Cosines and sines of T positions: [tables, T, elements] each."""
        place = positions.astype(np.float32)[:, None]
        angles = np.stack([place * frequencies for frequencies, _ in self._turns])
        factors = np.array([factor for _, factor in self._turns], dtype=np.float32)[:, None, None]
        cosine, sine = np.cos(angles) * factors, np.sin(angles) * factors
        return np.concatenate((cosine, cosine), axis=-1), np.concatenate((sine, sine), axis=-1)


def _turns(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    """Radians a position for each pair of elements, and the factor of cosines and sines."""
    kind = parameters.get("rope_type") or "default"
    heeded = kind != "default" or config["model_type"] in _PARTIAL
    size = int(config["head_dim"] * ((heeded and parameters.get("partial_rotary_factor")) or 1.0))
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies: Floats = np.float32(1.0) / np.float32(parameters["rope_theta"]) ** exponents
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        slower: Floats = frequencies / np.float32(parameters["factor"])
        return slower, 1.0
    if kind == "llama3":
        return _llama3(frequencies, parameters), 1.0
    assert kind == "yarn", f"rotary embeddings of type {kind} are refused before"
    return _yarn(frequencies, parameters, size, int(config["max_position_embeddings"]))


def _llama3(frequencies: Floats, parameters: Mapping[str, Any]) -> Floats:
    """Slow turns slowed down by `factor`, fast ones left, those between blended."""
    factor, original = float(parameters["factor"]), float(parameters["original_max_position_embeddings"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = original * frequencies / np.float32(2 * math.pi)  # within the original context
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    turned: Floats = ((1 - blend) * frequencies / factor + blend * frequencies).astype(np.float32)
    return turned


def _yarn(frequencies: Floats, parameters: Mapping[str, Any], size: int, context: int) -> tuple[Floats, float]:
    """Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023."""
    original = float(parameters["original_max_position_embeddings"])
    factor = float(parameters["factor"] or context / original)
    base = float(parameters["rope_theta"])

    def pair_of(turns: float) -> float:
        """The pair that turns so often within the original context."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(parameters.get("beta_fast") or _FAST), pair_of(parameters.get("beta_slow") or _SLOW)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low or 0.001), 0.0, 1.0)
    blended = frequencies / factor * ramp + frequencies * (1 - ramp)
    return blended.astype(np.float32), _yarn_factor(parameters, factor)


def _yarn_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    of_all, whole = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(of_all) / scale(whole) if of_all and whole else scale(1.0)
