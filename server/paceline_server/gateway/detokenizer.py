"""From token ids to text, one token at a time and never half a character. Called by `assembly`.

A byte-level token may hold part of a character. Every token is therefore looked up as bytes, and an incremental UTF-8
decoder gives out whole characters only. That makes the text independent of how tokens are grouped, and streamed text
equal to text decoded at once. Bytes that can never become a character are U+FFFD, as Unicode recommends (one for each
maximal part of a character); at the end of the text the same holds for a character that was cut.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline_server.errors import ModelUnsupported

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UTF8 = codecs.getincrementaldecoder("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`), reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


class TokenBytes:
    """What each token of a vocabulary says, in bytes; special tokens say nothing.

    Args:
        vocabulary: id by token, without added tokens.
        added_tokens: the entries of `added_tokens` in tokenizer.json.
        decoder: the entry `decoder` of tokenizer.json.

    Raises:
        ModelUnsupported: the decoder does something that cannot be done token by token.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        added_tokens: Sequence[Mapping[str, Any]],
        decoder: Mapping[str, Any] | None,
    ) -> None:
        steps = _steps(decoder)
        kinds = {step["type"] for step in steps}
        # By id, not a list: an id is whatever the file says, and must not size anything.
        self._pieces = {
            token_id: _from_bytes(token) if "ByteLevel" in kinds else _from_text(token, steps)
            for token, token_id in vocabulary.items()
        }
        for added in added_tokens:
            self._pieces[added["id"]] = b"" if added.get("special") else added["content"].encode()
        self.strips_first_space = any(_strips_first_space(step) for step in steps)

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; a padded vocabulary has ids that say nothing."""
        return self._pieces.get(token_id, b"")

    def __len__(self) -> int:
        """Tokens that are known."""
        return len(self._pieces)


class Detokenizer:
    """Decodes one sequence.

    Args:
        pieces: the vocabulary's bytes.
        continues: the text goes on from a prompt, so that a space at its start belongs to it; otherwise it stands alone
            and a decoder that adds a first space takes it off again.
    """

    def __init__(self, pieces: TokenBytes, *, continues: bool) -> None:
        self._pieces = pieces
        self._decoder = _UTF8(errors="replace")
        self._strip = pieces.strips_first_space and not continues

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        text = self._decoder.decode(self._pieces[token_id])
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """The rest at the end of the sequence: nothing, or U+FFFD for a cut character."""
        return self._decoder.decode(b"", final=True)

    def decode(self, token_ids: Iterable[int]) -> str:
        """All tokens of a whole sequence at once."""
        return "".join(map(self.push, token_ids)) + self.flush()


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The decoder as a flat list of steps that are all known."""
    if decoder is None:
        raise ModelUnsupported("it has no decoder: its tokens cannot be turned into text")
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    known = decoder["type"] in {"ByteLevel", "ByteFallback", "Fuse", "Metaspace"}
    if known or _strips_first_space(decoder) or (decoder["type"] == "Replace" and "String" in decoder["pattern"]):
        return [decoder]
    raise ModelUnsupported(
        f"the tokenizer's decoder {decoder['type']} is not supported; "
        "supported are ByteLevel, and ByteFallback, Fuse, Metaspace, Replace and Strip of a first space"
    )


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] == 1 and step["stop"] == 0)


def _from_bytes(token: str) -> bytes:
    return b"".join(bytes([_BYTE_ALPHABET[char]]) if char in _BYTE_ALPHABET else char.encode() for char in token)


def _from_text(token: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    for step in steps:
        match step["type"]:
            case "ByteFallback" if byte := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(byte[1], 16)])
            case "Metaspace":
                token = token.replace(step["replacement"], " ")
            case "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            case _:
                pass
    return token.encode("utf-8", errors="replace")
