"""Bodies as JSON objects, read strictly: what two parsers could read differently is refused. Called by `reception`.

RFC 8259 leaves duplicate names, huge numbers and lone surrogates to the reader, and Python's parser accepts NaN
besides. A request that means one thing to a proxy and another to us is a hole, so all of these are errors.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

from paceline_server.errors import InvalidRequest

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class _Refused(Exception):
    """What the parser's hooks raise; its text completes "the body is not valid JSON: …"."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        InvalidRequest: not UTF-8, not JSON, nested too deeply, not an object, a name twice in one object, a number that
            is not finite or has thousands of digits, or a string with half a surrogate pair.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} does not belong there") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except _Refused as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except ValueError:  # int() refuses thousands of digits, because converting them takes quadratic time
        raise InvalidRequest("the body is not valid JSON: an integer has too many digits") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise _Refused(f"the name {twice[:64]!r} is given twice in one object")
    return members


def _refuse_constant(name: str) -> None:
    raise _Refused(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _Refused(f"the number {digits[:32]} is out of range")
    return number


def _refuse_lone_surrogates(value: Any) -> None:
    """Walk without recursion: the parser may have let through more levels than are left on our stack."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise InvalidRequest("a string of the body has half a surrogate pair, which is no character") from None
        elif isinstance(item, dict):
            todo.extend(item)
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
