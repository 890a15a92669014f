"""From a validated model's complaints to one error for the client. Called by `reception`.

OpenAI's error object has room for one `param`: it is the path of the first mistake, as `messages[0].content[1].type`.
The message names every mistake (up to a bound) by its path and never repeats more of the input than a short scalar.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from paceline_server.errors import InvalidRequest
from paceline_server.field_path import field_path

_SHOWN = 5
_ECHOED_CHARS = 40
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
    "unsupported_value": "unsupported_value",
    "too_short": "empty_array",
}

Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], fields: dict[str, Any]) -> Model:
    """`fields` as a validated request.

    Raises:
        InvalidRequest: naming each mistake; `param` is the path of the first, None where the body is at fault.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _explain(error, model) from None


def _explain(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    mistakes = error.errors(include_url=False)
    lines = [_describe(mistake, model) for mistake in mistakes[:_SHOWN]]
    if len(mistakes) > _SHOWN:
        lines.append(f"and {len(mistakes) - _SHOWN} more mistakes")
    first = mistakes[0]
    code = _CODES.get(first["type"], "invalid_value")
    return InvalidRequest("; ".join(lines), param=_path(_place(first)) or None, code=code)


def _place(mistake: Any) -> tuple[int | str, ...]:
    """Where it is: where pydantic found it, and further inside where only its validator knew, see `fields.mistake`."""
    return (*mistake["loc"], *mistake.get("ctx", {}).get("place", ()))


def _describe(mistake: Any, model: type[BaseModel]) -> str:
    """`path: what is wrong there`; a mistake of the body itself has no path."""
    place = _place(mistake)
    text = _say(mistake, place, model)
    return f"{_path(place)}: {text}" if place else f"the body {text}"


def _say(mistake: Any, place: tuple[int | str, ...], model: type[BaseModel]) -> str:
    match mistake["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return f"is not a known field{_suggestion(_section(model, place[:-1]), str(place[-1]))}"
        case "model_type":
            return "must be an object"
    text = str(mistake["msg"]).replace("Input should be", "must be").replace("List should have", "must have")
    text = text.replace(" after validation", "")
    return f"{text}{_echo(mistake['input'])}" if "must be" in text else text


def _suggestion(section: type[BaseModel] | None, name: str) -> str:
    """`; did you mean …?` where the same object has a field that is spelt alike."""
    known = list(section.model_fields) if section is not None else []
    close = difflib.get_close_matches(name[:_ECHOED_CHARS], known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _section(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """The model of the object at a place of the body; None where there is none."""
    section: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue  # an item is of its list's type
        field = section.model_fields.get(part) if section is not None else None
        section = next(_models(field.annotation), None) if field is not None else None
    return section


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _path(location: tuple[int | str, ...]) -> str:
    return field_path(part if isinstance(part, int) else part[:_ECHOED_CHARS] for part in location)


def _echo(value: Any) -> str:
    """The refused value where it is a short scalar: enough to recognise, never a prompt."""
    if isinstance(value, int | float | bool | str | None):
        if isinstance(value, int) and abs(value) >= 10**_ECHOED_CHARS:
            return ""
        shown = repr(value)
        return f", not {shown}" if len(shown) <= _ECHOED_CHARS else ""
    return ""
