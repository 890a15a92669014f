"""What a folder says about a sentence encoder: its modules as sentence-transformers writes them, checked by name.

Pure functions over the folder's JSON files, free of torch. `engine.process` asks which kind of model a folder holds;
`encoder` loads by what is said here. Whatever would change the vectors and is not honoured is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_server.errors import InvalidConfiguration, ModelUnsupported

MODULES = "modules.json"
"""A folder with this file is a sentence-transformers model."""

ENCODERS = frozenset({"bert"})
"""Values of model_type that are served for embeddings."""

_SETTINGS = "sentence_bert_config.json"
_NO_LIMIT = 1 << 30
_LEGACY_MODES = (
    "cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken",
)  # fmt: skip

_FEATURES = {
    "auto_map": "custom code from the model's folder",
    "quantization_config": "a quantized checkpoint",
    "is_decoder": "a BERT that reads from left to right",
    "add_cross_attention": "cross attention",
}


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """What is done around the encoder.

    Attributes:
        normalize: vectors are brought to length 1 after the mean over the tokens.
        max_seq_length: tokens that a text may have by the folder's own word, or None.
    """

    normalize: bool
    max_seq_length: int | None


def is_sentence_model(folder: Path) -> bool:
    """Whether the folder holds a model that embeds."""
    return (folder / MODULES).is_file()


def read_sentence_model(folder: Path) -> SentenceModel:
    """The modules of a sentence-transformers folder: Transformer, Pooling by the mean, and perhaps Normalize.

    Raises:
        ModelUnsupported: other modules, another pooling, or files that are not what they should be.
    """
    modules = _read(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelUnsupported(f"{folder / MODULES} must hold a list of modules")
    kinds = [str(module.get("type")).rsplit(".", 1)[-1] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelUnsupported(
            f"sentence modules {', '.join(kinds)} are not supported ({MODULES}); "
            "supported are Transformer, Pooling and Normalize, in this order"
        )
    _require_mean(folder / str(modules[1].get("path")) / "config.json")
    _require_plain_texts(folder)
    return SentenceModel("Normalize" in kinds, _max_seq_length(folder))


def require_encoder(config: Mapping[str, Any]) -> None:
    """Refuse an encoder that config.json does not make one of ours.

    Raises:
        ModelUnsupported: with the feature and its key.
    """
    family = str(config.get("model_type"))
    if family not in ENCODERS:
        raise ModelUnsupported(
            f"model_type {family} is not supported for embeddings; supported are {', '.join(sorted(ENCODERS))}"
        )
    for key, feature in _FEATURES.items():
        if config.get(key):
            raise ModelUnsupported(f"{feature} is not supported (config.json: {key}; model_type {family})")
    position = config.get("position_embedding_type", "absolute")
    if position != "absolute":
        raise ModelUnsupported(f"{position} positions are not supported (config.json: position_embedding_type)")


def longest_text(model: SentenceModel, config: Mapping[str, Any], configured: int | None) -> int:
    """Tokens that a text may have: the configured number, or the folder's own; never more than there are positions.

    Raises:
        InvalidConfiguration: more is configured than the model has positions.
    """
    positions = int(config["max_position_embeddings"])
    if configured is not None and configured > positions:
        raise InvalidConfiguration(
            f"engine.max_model_len: {configured} is more than the model's limit of {positions} tokens "
            "(config.json: max_position_embeddings)"
        )
    return min(positions, configured or model.max_seq_length or positions)


def _require_mean(path: Path) -> None:
    """Later versions write `pooling_mode`, one or several; earlier ones a key for each mode."""
    pooling = _object(path)
    modes = pooling.get("pooling_mode")
    if modes is None:
        modes = [mode for mode in _LEGACY_MODES if pooling.get(f"pooling_mode_{mode}")]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if [str(mode).removesuffix("_tokens") for mode in modes] != ["mean"]:
        asked = ", ".join(map(str, modes)) or "nothing"
        raise ModelUnsupported(f"pooling by {asked} is not supported ({path}); supported is the mean alone")


def _require_plain_texts(folder: Path) -> None:
    """Refuse what sentence-transformers would do to a text before it is tokenised."""
    path = folder / "config_sentence_transformers.json"
    if path.is_file() and _object(path).get("default_prompt_name"):
        raise ModelUnsupported(f"a prompt before every text is not supported ({path}: default_prompt_name)")
    path = folder / _SETTINGS
    if path.is_file() and _object(path).get("do_lower_case"):
        raise ModelUnsupported(f"lower case apart from the tokenizer's own is not supported ({path}: do_lower_case)")


def _max_seq_length(folder: Path) -> int | None:
    """The folder's word on the longest text: its own setting, or in later versions the tokenizer's."""
    for name, key in ((_SETTINGS, "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        longest = _object(folder / name).get(key) if (folder / name).is_file() else None
        if longest is None:
            continue
        if not isinstance(longest, int | float) or longest < 1:
            raise ModelUnsupported(f"{folder / name}: {key} must be a number of tokens, not {longest!r}")
        return min(int(longest), _NO_LIMIT)  # transformers writes 10^30 for no limit
    return None


def _object(path: Path) -> Mapping[str, Any]:
    content = _read(path)
    if not isinstance(content, dict):
        raise ModelUnsupported(f"{path} must hold a JSON object")
    return content


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{path} cannot be read: {error}") from None
