"""Stop strings, finish reasons and counts come out the same however tokens are grouped."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.engine.interface import FinishReason
from paceline_server.gateway.assembly import Delta, StopStrings, TextAssembly
from paceline_server.gateway.detokenizer import Detokenizer, TokenBytes

PIECES = TokenBytes({letter: number for number, letter in enumerate("abcdefgh")}, [], {"type": "ByteLevel"})
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def assembly(*stops: str, min_tokens: int = 0) -> TextAssembly:
    return TextAssembly(Detokenizer(PIECES, continues=True), stops, min_tokens)


def tokens(text: str) -> list[int]:
    return ["abcdefgh".index(letter) for letter in text]


def expected(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first."""
    places = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(places)[1]] if places else text


@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_no_grouping_of_the_text_changes_what_is_shown(parts: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops)
    shown = ""
    for part in parts:
        text, stopped = finder.push(part)
        shown += text
        if stopped:
            break
    else:
        shown += finder.flush()
    assert shown == expected("".join(parts), stops)


@given(parts=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=8))
def test_text_is_held_back_only_while_it_may_become_a_stop_string(parts: list[str]) -> None:
    finder = StopStrings(["abca"])
    seen = shown = ""
    for part in parts:
        seen += part
        text, stopped = finder.push(part)
        shown += text
        if stopped:
            return
        held = seen[len(shown) :]
        assert "abca".startswith(held)


def test_a_stop_string_across_tokens_ends_the_text_before_it_and_counts_the_tokens_up_to_it() -> None:
    """Tokens behind it in the same step are neither text nor usage."""
    one = assembly("cd")
    assert one.push(tokens("abc"), None) == Delta("ab", 3)
    assert one.push(tokens("def"), None) == Delta("", 1, STOP)


@pytest.mark.parametrize("limit", range(1, 7))
def test_one_step_of_many_tokens_equals_many_steps_of_one(limit: int) -> None:
    """A stop and the limit in one accepted run: the first of them decides, as it would one by one."""
    run = tokens("abcdef")[:limit]
    finish = LENGTH if limit == len(run) else None
    together = assembly("cd").push(run, finish)
    apart = assembly("cd")
    deltas = [apart.push([token], finish if index == limit - 1 else None) for index, token in enumerate(run[:4])]
    assert together.text == "".join(delta.text for delta in deltas)
    assert together.finish == deltas[-1].finish
    assert together.tokens == sum(delta.tokens for delta in deltas)


def test_the_stop_token_counts_and_is_no_text() -> None:
    assert assembly().push(tokens("abh"), STOP) == Delta("ab", 3, STOP)


def test_the_last_token_within_the_limit_is_text() -> None:
    assert assembly().push(tokens("abh"), LENGTH) == Delta("abh", 3, LENGTH)


def test_what_was_held_back_is_shown_when_the_text_ends_otherwise() -> None:
    one = assembly("cde")
    assert one.push(tokens("abcd"), None) == Delta("ab", 4)
    assert one.push(tokens("h"), STOP) == Delta("cd", 1, STOP)


def test_a_stop_string_complete_at_the_limit_is_a_stop() -> None:
    assert assembly("cd").push(tokens("abcd"), LENGTH) == Delta("ab", 4, STOP)


def test_a_stop_string_before_min_tokens_is_text() -> None:
    one = assembly("ab", min_tokens=3)
    assert one.push(tokens("ab"), None) == Delta("ab", 2)
    assert one.push(tokens("cab"), None) == Delta("c", 3, STOP)


def test_a_cut_character_is_shown_at_the_end() -> None:
    pieces = TokenBytes(json.loads('{"Ã": 0, "a": 1}'), [], {"type": "ByteLevel"})
    one = TextAssembly(Detokenizer(pieces, continues=True))
    assert one.push([1, 0], LENGTH) == Delta("a\ufffd", 2, LENGTH)
