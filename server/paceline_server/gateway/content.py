"""What a chat message says: a text, or parts, of which text is the only kind so far. Used by `requests`."""

from __future__ import annotations

from typing import Any

from paceline_server.gateway.fields import mistake

_SHOWN_CHARS = 40
_PART = '{"type": "text", "text": "..."}'


def message_text(value: Any) -> str | None:
    """A message's text; parts are joined with a newline, as most servers do for templates that take text only."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise mistake("must be a string or a list of text parts, and not empty")
    return "\n".join(_part_text(part, index) for index, part in enumerate(value))


def _part_text(part: Any, index: int) -> str:
    if not isinstance(part, dict):
        raise mistake(f"must be an object: {_PART}", index)
    kind = _string(part, "type", index)
    if kind != "text":
        shown = kind[:_SHOWN_CHARS]
        raise mistake(f"{shown} is not supported; only text is: {_PART}", index, "type", kind="unsupported_value")
    text = _string(part, "text", index)
    for name in part:
        if name not in ("type", "text"):
            raise mistake("is not a known field", index, name, kind="extra_forbidden")
    return text


def _string(part: dict[str, Any], name: str, index: int) -> str:
    if name not in part:
        raise mistake("is required", index, name, kind="missing")
    value = part[name]
    if not isinstance(value, str):
        raise mistake("must be a string", index, name)
    return value
