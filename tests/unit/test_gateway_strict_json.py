"""Bodies that two parsers could read differently are refused, never a fault of the server."""

from __future__ import annotations

import time

import pytest

from paceline_server.errors import InvalidRequest
from paceline_server.gateway.strict_json import parse_object


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "line 1, column 2"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' is given twice"),
        (b'{"x": {"b": 1, "b": 1}}', "'b' is given twice"),
        (b'{"a": "\\ud83d"}', "surrogate"),
        (b'{"a": ["\\udc00x"]}', "surrogate"),
        (b'{"\\uD800": 1}', "surrogate"),
        (b'{"a": "\xff"}', "not UTF-8: byte 7"),
        ("{}".encode("utf-16"), "not UTF-8"),
        ("{}".encode("utf-16-le"), "not valid JSON"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_body_is_refused_with_the_reason(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_object(body)


def test_a_good_body_is_read_with_whole_surrogate_pairs() -> None:
    body = b'{"text": "\\ud83d\\ude80", "seed": 9223372036854775807, "temperature": 0.5}'
    assert parse_object(body) == {"text": "🚀", "seed": 2**63 - 1, "temperature": 0.5}


def test_a_million_strings_are_read_at_the_speed_of_the_parser() -> None:
    body = b'{"prompt": [' + b",".join([b'"x"'] * 1_000_000) + b"]}"
    begun = time.perf_counter()
    assert len(parse_object(body)["prompt"]) == 1_000_000
    assert time.perf_counter() - begun < 3  # it takes a tenth of a second; a hook per string would take many
