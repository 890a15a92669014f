"""Keeps the tokenizer's special tokens apart from text that only looks like them. Called by `tokenizer`, `model_text`.

A chat template writes markers such as `<|im_end|>` and the user's text between them. Once both are one string nobody
can tell them apart, and a user could end their own turn and forge a system turn. So:

1. `guard` puts a mark, a character that occurs in none of the user's strings, into every special token in the user's
   text, and at an end of the text that could complete a special token together with its neighbour;
2. the template is rendered;
3. `disguise` turns the special tokens that are whole now, which are the template's own, into aliases that nobody can
   guess, and removes the marks;
4. the tokenizer knows the aliases in place of the special tokens, so what the user wrote is plain text to it.

Text without special tokens is encoded exactly as the tokenizer encodes it alone: aliases stand where the tokens stood.
Added tokens that the tokenizer does not call special (such as `<think>`) are text that a model reads as one token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_PRIVATE_USE = range(0x100000, 0x10FFFE)


class SpecialTokens:
    """The special tokens of one tokenizer, and this process's aliases of them.

    Args:
        added_tokens: the entries of `added_tokens` in tokenizer.json.
    """

    def __init__(self, added_tokens: Sequence[Mapping[str, Any]]) -> None:
        special = [token for token in added_tokens if token.get("special") and token["content"]]
        nonce = secrets.token_hex(8)
        self.ids: dict[str, int] = {token["content"]: token["id"] for token in special}
        self.aliases: dict[str, str] = {
            text: f"\U000f0000{nonce}.{number}\U000f0001" for number, text in enumerate(self.ids)
        }
        longest_first = sorted(special, key=lambda token: len(token["content"]), reverse=True)
        self._pattern = re.compile("|".join(map(_pattern, longest_first)) or "(?!)")
        self._heads = frozenset(text[:end] for text in self.ids for end in range(1, len(text)))
        self._tails = frozenset(text[start:] for text in self.ids for start in range(1, len(text)))
        self._longest = max(map(len, self.ids), default=0)

    def mark_for(self, texts: Iterable[str]) -> str:
        """A character that occurs in none of `texts`."""
        used = set().union(*texts)
        free = (mark for mark in _NONCHARACTERS if mark not in used)
        mark = next(free, None) or next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
        assert mark is not None, "a text that uses a whole plane of private characters is longer than any context"
        return mark

    def guard(self, text: str, mark: str) -> str:
        """`text` with `mark` inside every special token, and at an end that is part of one."""
        text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        lengths = range(1, min(len(text) + 1, self._longest))
        starts = any(text[:length] in self._tails for length in lengths)
        ends = any(text[-length:] in self._heads for length in lengths)
        return (mark if starts else "") + text + (mark if ends else "")

    def disguise(self, rendered: str, mark: str = "") -> str:
        """`rendered` with aliases in place of special tokens, and without the marks."""
        text = self._pattern.sub(lambda match: self.aliases[match[0]], rendered)
        return text.replace(mark, "") if mark else text


def _pattern(token: Mapping[str, Any]) -> str:
    text = re.escape(token["content"])
    return rf"(?<!\w){text}(?!\w)" if token.get("single_word") else text
