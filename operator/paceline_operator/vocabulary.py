"""The server's settings in the words of an LLMService. Pure; called by `failures` for what a server says last.

A server names the keys of its configuration file (`engine.max_model_len`), which nobody has written who wrote an
LLMService (`spec.engine.maxModelLen`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pydantic.alias_generators import to_camel

from paceline_operator.desired.config import ENGINE_GROUPS, server_path

_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {".".join(server_path(name)): f"spec.engine.{to_camel(name)}" for name in ENGINE_GROUPS}
    | {
        "engine.model_path": "spec.model",
        "engine.device": "spec.resources",
        "gateway.drain_seconds": "spec.drainSeconds",
        "kv_cache.handover.peer": "spec.handover",
        "kv_cache.handover.max_prefixes": "spec.handover.maxPrefixes",
        "kv_cache.handover.max_seconds": "spec.handover.maxSeconds",
    }
)
_SAME_SHAPE: Final = ("scheduling", "tenants")  # sections that the two have alike, but for the letters' case
_KEYS: Final = re.compile(r"\bkey_files\b.*")  # of a tenant: one, made from keysFrom
_WORD: Final = re.compile(r"\w+")
_PATH: Final = re.compile(
    r"(?<![\w./])(?:engine|batching|kv_cache|gateway|observability|scheduling|tenants)(?:\[\d+\]|\.\w+)+"
)


def in_words_of_the_spec(text: str) -> str:
    """The text with every path of the configuration file that a user can set replaced by its field."""
    return _PATH.sub(lambda path: _field(path[0]), text)


def _field(path: str) -> str:
    if path.startswith(_SAME_SHAPE):
        return f"spec.{_WORD.sub(lambda word: to_camel(word[0]), _KEYS.sub('keysFrom', path))}"
    return _SETTINGS.get(path, path)
