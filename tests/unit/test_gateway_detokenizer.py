"""Tokens become text without ever showing half a character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from paceline_server.errors import ModelUnsupported
from paceline_server.gateway.detokenizer import Detokenizer, TokenBytes
from paceline_server.testing import write_model

SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
EMOJI = "🧑‍🚀 naïve 你好 🇳🇴 e\u0301"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pieces(tokenizer: Tokenizer) -> TokenBytes:
    definition = json.loads(tokenizer.to_str())
    return TokenBytes(definition["model"]["vocab"], definition["added_tokens"], definition["decoder"])


def test_no_prefix_of_the_tokens_shows_a_replacement_character(tokenizer: Tokenizer, pieces: TokenBytes) -> None:
    """Each character comes when its last byte does, and all of them together are the text."""
    detokenizer = Detokenizer(pieces, continues=False)
    shown = [detokenizer.push(token) for token in tokenizer.encode(EMOJI).ids]
    assert all("\ufffd" not in part for part in shown)
    assert "".join(shown) == EMOJI
    assert detokenizer.flush() == ""


def test_a_character_cut_by_the_end_is_one_replacement_character(tokenizer: Tokenizer, pieces: TokenBytes) -> None:
    ids = tokenizer.encode("ok🚀").ids[:-1]
    assert Detokenizer(pieces, continues=False).decode(ids) == "ok\ufffd"


@given(ids=st.lists(st.integers(min_value=0, max_value=359), max_size=40))
def test_any_tokens_decode_as_the_library_decodes_them_whole(
    ids: list[int], model: tuple[Tokenizer, TokenBytes]
) -> None:
    """Also where they are no valid UTF-8, special tokens left out."""
    tokenizer, pieces = model
    assert Detokenizer(pieces, continues=False).decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, pieces: TokenBytes) -> tuple[Tokenizer, TokenBytes]:
    return tokenizer, pieces


def test_ids_beyond_the_tokenizer_say_nothing(pieces: TokenBytes) -> None:
    """Vocabularies are padded: a model can sample an id that no token has."""
    assert Detokenizer(pieces, continues=False).decode([100_000]) == ""


def test_byte_fallback_tokens_are_joined_to_characters() -> None:
    """A whole character followed by the first byte of the next must not take the first one back."""
    vocabulary = {"▁a": 0, "<0xE4>": 1, "<0xBD>": 2, "<0xA0>": 3, "▁b": 4}
    detokenizer = Detokenizer(TokenBytes(vocabulary, [], SENTENCEPIECE), continues=False)
    shown = [detokenizer.push(token) for token in (0, 1, 2, 3, 1, 2, 3, 4)]
    assert shown == ["a", "", "", "你", "", "", "你", " b"]


def test_a_continuation_keeps_the_space_that_a_text_of_its_own_loses() -> None:
    pieces = TokenBytes({"▁Paris": 0}, [], SENTENCEPIECE)
    assert Detokenizer(pieces, continues=True).decode([0]) == " Paris"
    assert Detokenizer(pieces, continues=False).decode([0]) == "Paris"


def test_added_tokens_that_are_not_special_are_text() -> None:
    added = [{"id": 1, "content": "<think>", "special": False}, {"id": 2, "content": "<|end|>", "special": True}]
    pieces = TokenBytes({"a": 0}, added, {"type": "ByteLevel"})
    assert Detokenizer(pieces, continues=False).decode([1, 0, 2]) == "<think>a"


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]
)
def test_a_decoder_that_cannot_work_token_by_token_is_refused(decoder: dict[str, object] | None) -> None:
    with pytest.raises(ModelUnsupported, match="decoder"):
        TokenBytes({}, [], decoder)


def test_the_decoders_of_a_sequence_are_looked_at_too() -> None:
    with pytest.raises(ModelUnsupported, match="CTC"):
        TokenBytes({}, [], {"type": "Sequence", "decoders": [{"type": "CTC"}]})


def test_a_model_folder_is_written_as_the_library_reads_it(tmp_path: Path) -> None:
    """Guards the tests' own model: its special tokens have the ids that tests rely on."""
    tokenizer = write_model(tmp_path)
    assert [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
