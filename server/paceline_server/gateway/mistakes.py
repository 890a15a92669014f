"""From a validated model's complaints to one error for the client. Called by `chat` and `completions`.

OpenAI's error object has room for one `param`: it is the top-level field of the first mistake. The message names every
mistake (up to a bound) with its full path and never repeats more of the input than a short scalar.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from paceline_server.errors import InvalidRequest

MAX_FIELDS = 256
_SHOWN = 5
_ECHOED_CHARS = 40
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
    "too_short": "empty_array",
}

Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], fields: dict[str, Any]) -> Model:
    """`fields` as a validated request.

    Raises:
        InvalidRequest: naming each mistake; `param` is the field of the first.
    """
    if len(fields) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(fields)} fields; at most {MAX_FIELDS} are looked at")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> InvalidRequest:
    mistakes = error.errors(include_url=False)
    lines = [_describe(mistake) for mistake in mistakes[:_SHOWN]]
    if len(mistakes) > _SHOWN:
        lines.append(f"and {len(mistakes) - _SHOWN} more mistakes")
    first = mistakes[0]
    code = _CODES.get(first["type"], "invalid_value")
    return InvalidRequest("; ".join(lines), param=_field(first), code=code)


def _field(mistake: Any) -> str:
    """Mistakes between fields have no place of their own: their validators give the field's name as the type."""
    return str(mistake["loc"][0] if mistake["loc"] else mistake["type"])[:_ECHOED_CHARS]


def _describe(mistake: Any) -> str:
    place = _path(mistake["loc"])
    if not place:
        return str(mistake["msg"])
    if mistake["type"] == "missing":
        return f"{place} is required"
    if mistake["type"] == "extra_forbidden":
        return f"{place} is not a known field"
    if mistake["type"] == "model_type":
        return f"{place} must be an object"
    message = str(mistake["msg"]).replace("Input should be", "must be").replace("List should have", "must have")
    message = message.replace(" after validation", "")
    return f"{place}: {message}{_echo(mistake['input'])}" if "must be" in message else f"{place} {message}"


def _path(location: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:_ECHOED_CHARS]}" for part in location)
    return "".join(parts).removeprefix(".")


def _echo(value: Any) -> str:
    """The refused value where it is a short scalar: enough to recognise, never a prompt."""
    if isinstance(value, int | float | bool | str | None):
        if isinstance(value, int) and abs(value) >= 10**_ECHOED_CHARS:
            return ""
        shown = repr(value)
        return f", not {shown}" if len(shown) <= _ECHOED_CHARS else ""
    return ""
