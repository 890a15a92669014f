"""The model's tokenizer: text and rendered chats to token ids. Loaded by `model_text`, called through it.

Works on tokenizer.json with the `tokenizers` library, so neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline_server.errors import ContextLengthExceeded, InvalidRequest, ModelUnsupported
from paceline_server.gateway.detokenizer import TokenBytes
from paceline_server.gateway.markers import SpecialTokens
from paceline_server.gateway.model_files import read_object

_NORMALIZER_SHRINKS = 4  # a normalizer may compose characters or drop some; more than three in four it does not


class ModelTokenizer:
    """Encodes for one model.

    Its tokenizer knows random aliases in place of the special tokens (see `markers`); ids are mapped back.

    Args:
        definition: the content of tokenizer.json.
        decodes: token ids have to be turned back into text; a model that embeds never does.

    Raises:
        ModelUnsupported: the definition cannot be loaded or its decoder is not supported.
    """

    def __init__(self, definition: Mapping[str, Any], *, decodes: bool = True) -> None:
        added = _added_tokens(definition)
        self.special = SpecialTokens(added)
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps({**definition, "added_tokens": self._disguised(added)}))
        except Exception as error:  # the library raises bare Exception for every fault of a definition
            raise ModelUnsupported(f"the tokenizer cannot be loaded: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        self._pieces = TokenBytes(vocabulary, added, definition.get("decoder")) if decodes else None
        self._ids = {*vocabulary.values(), *(token["id"] for token in added)}
        self._real_ids = {
            self._tokenizer.token_to_id(alias): self.special.ids[text] for text, alias in self.special.aliases.items()
        }
        self._special_ids = frozenset(self.special.ids.values())
        longest = max(map(len, [*vocabulary, *(token["content"] for token in added)]), default=1)
        self._chars_per_token = longest * (_NORMALIZER_SHRINKS if definition.get("normalizer") else 1)

    @classmethod
    def load(cls, folder: Path, *, decodes: bool = True) -> ModelTokenizer:
        """The tokenizer of a model's folder.

        Raises:
            ModelUnsupported: there is no tokenizer.json, or it cannot be used.
        """
        path = folder / "tokenizer.json"
        definition = read_object(path)
        if definition is None:
            raise ModelUnsupported(f"{folder} has no tokenizer.json: only fast tokenizers are supported")
        try:
            return cls(definition, decodes=decodes)
        except ModelUnsupported as error:
            raise ModelUnsupported(f"{path}: {error}") from None

    @property
    def pieces(self) -> TokenBytes:
        """What each token says."""
        assert self._pieces is not None, "a tokenizer that does not decode"
        return self._pieces

    def refuse_stray_ids(self, vocab_size: int) -> None:
        """Refuse a tokenizer that is not the model's.

        One token more than the model knows (a padding token that was added later) is common, and harms nobody who does
        not write it; so an id may also be as large as the number of tokens allows.

        Raises:
            ModelUnsupported: an id is beyond the model's vocabulary and beyond the number of tokens.
        """
        largest = max(self._ids, default=-1)
        if largest >= max(vocab_size, len(self._ids)):
            raise ModelUnsupported(
                f"tokenizer.json has a token with the id {largest}, but the model has {vocab_size} tokens and the "
                f"tokenizer {len(self._ids)}: they do not belong together"
            )

    def encode_text(self, text: str) -> list[int]:
        """A plain prompt, with what the tokenizer adds by default; special tokens in it are control tokens."""
        return self._real(self._encode(self.special.disguise(text), add_special_tokens=True))

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Several texts, each as `encode_text` does it."""
        disguised = [self.special.disguise(text) for text in texts]
        return [self._real(found.ids) for found in self._tokenizer.encode_batch_fast(disguised)]

    def encode_chat(self, rendered: str, mark: str) -> list[int]:
        """A rendered chat, whose user text was guarded with `mark`.

        Raises:
            InvalidRequest: the vocabulary itself spells a special token, so user text cannot be kept apart from it.
        """
        ids = self._encode(self.special.disguise(rendered, mark), add_special_tokens=False)
        if not self._special_ids.isdisjoint(ids):
            raise InvalidRequest(
                "the messages hold a text that this model's tokenizer can only read as a control token",
                param="messages",
                code="invalid_value",
            )
        return self._real(ids)

    def refuse_hopeless(self, chars: int, max_tokens: int, param: str) -> None:
        """Refuse before tokenising what no tokenisation could fit.

        Raises:
            ContextLengthExceeded: even if every token were the longest there is, `chars` make more than `max_tokens`.
        """
        if chars > self.chars_that_fit(max_tokens):
            raise ContextLengthExceeded(
                f"This model's maximum context length is {max_tokens} tokens. However, your {param} has {chars} "
                f"characters, and no text of more than {self.chars_that_fit(max_tokens)} can fit. Shorten it.",
                param=param,
            )

    def chars_that_fit(self, max_tokens: int) -> int:
        """Characters that `max_tokens` tokens can say at most."""
        return max_tokens * self._chars_per_token

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # encode() holds the interpreter lock, the batch form gives it up: the event loop goes on meanwhile.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _real(self, ids: list[int]) -> list[int]:
        return [self._real_ids.get(token, token) for token in ids]

    def _disguised(self, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
        aliases = self.special.aliases
        return [
            {**token, "content": aliases[token["content"]], "normalized": False}
            if token["content"] in aliases
            else token
            for token in added
        ]


def _added_tokens(definition: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of `added_tokens`, of which the parts used here are checked; the library checks the rest."""
    added = definition.get("added_tokens") or []
    if not isinstance(added, list) or not all(map(_is_added_token, added)):
        raise ModelUnsupported("added_tokens must be a list of objects with an integer id and a string content")
    return added


def _is_added_token(token: Any) -> bool:
    return isinstance(token, dict) and type(token.get("id")) is int and isinstance(token.get("content"), str)
