"""Types of request fields: what one value may be. Used by `requests` and `embedding_request`.

Lengths are looked at before elements, and by these validators instead of pydantic's: a union would try a list of a
million strings against every member and keep a mistake for each element.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MAX_MEMBERS = 256  # of an object; no kind of request has as many fields
MAX_STOPS = 4  # as in the OpenAI reference
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_INPUTS = 2048  # of an embedding request, as in the OpenAI reference
MAX_LABEL_CHARS = 512
MAX_METADATA = 16  # pairs, as in the OpenAI reference
MAX_PRIORITY = 1000
MAX_TIMEOUT_SECONDS = 86_400

_LABEL_RULE = f"must be a string of at most {MAX_LABEL_CHARS} characters"


class Strict(BaseModel):
    """An object of which every field is known and of its own type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_members(cls, value: Any) -> Any:
        """Before pydantic keeps a mistake for each unknown one: a body has room for millions."""
        if isinstance(value, dict) and len(value) > MAX_MEMBERS:
            raise mistake(f"has {len(value)} fields; at most {MAX_MEMBERS} are looked at")
        return value


class RequestFields(Strict):
    """The body of a request for a model."""

    model: str


def mistake(text: str, *place: int | str, kind: str = "value") -> PydanticCustomError:
    """What is wrong with a value, or at a place inside it that its validator alone knows.

    Args:
        kind: the code for clients is found by it, see `mistakes`.
    """
    # In this order: pydantic fills in one after the other, so that `{place}` in the text would be filled in as well.
    return PydanticCustomError(kind, "{text}", {"place": place, "text": text})


def only(*harmless: Any) -> AfterValidator:
    """A field that is not supported yet: null and the `harmless` values change nothing, others are refused."""
    listed = " or ".join([*map(json.dumps, harmless), "null"])

    def check(value: Any) -> Any:
        if value is None or any(_same(value, fine) for fine in harmless):
            return value
        raise mistake(f"is not supported yet; leave it out or send {listed}", kind="unsupported")

    return AfterValidator(check)


def label(value: Any) -> Any:
    """A short string that means something to the client only."""
    if value is not None and not _is_label(value):
        raise mistake(_LABEL_RULE)
    return value


def labels(value: Any) -> Any:
    """A few labels by name."""
    if value is None:
        return value
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise mistake(f"must be an object of at most {MAX_METADATA} strings")
    for name, item in value.items():
        if not _is_label(item):
            raise mistake(_LABEL_RULE, name)
    return value


def stop_strings(value: Any) -> tuple[str, ...]:
    """Stop strings: one, or a list."""
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or len(given) > MAX_STOPS:
        raise mistake(f"must be a string or a list of at most {MAX_STOPS} strings")
    for index, stop in enumerate(given):
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            place = (index,) if isinstance(value, list) else ()
            raise mistake(f"must be a string of 1 to {MAX_STOP_CHARS} characters", *place)
    return tuple(given)


def stop_tokens(value: Any) -> tuple[int, ...]:
    """Token ids that end a sequence."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKEN_IDS:
        raise mistake(f"must be a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return _token_ids(value)


def one_prompt(value: Any) -> str | tuple[int, ...]:
    """One prompt: a text, a list of token ids, or a list that holds one of these."""
    place: tuple[int, ...] = ()
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise mistake(f"only one prompt per request is supported so far, not {len(value)}")
        value, place = value[0], (0,)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise mistake("must be a string or a list of token ids, and not empty", *place)
    return _token_ids(value, *place)


def texts_or_tokens(value: Any) -> tuple[str, ...] | tuple[tuple[int, ...], ...]:
    """Inputs of one kind: a text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise mistake("must be a string, a list of strings, or token ids in one list or several, and not empty")
    inputs = value if isinstance(value[0], str | list) else [value]
    if len(inputs) > MAX_INPUTS:
        raise mistake(f"at most {MAX_INPUTS} inputs per request, not {len(inputs)}")
    if all(isinstance(item, str) for item in inputs):
        return tuple(inputs)
    if not all(isinstance(item, list) and item for item in inputs):
        raise mistake("inputs must all be strings, or all be lists of token ids that are not empty")
    if inputs is not value:
        return (_token_ids(value),)
    return tuple(_token_ids(item, index) for index, item in enumerate(inputs))


Label = Annotated[str | None, BeforeValidator(label)]
Unsupported = Annotated[Any, only()]


def _is_label(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_LABEL_CHARS


def _token_ids(value: list[Any], *place: int) -> tuple[int, ...]:
    """Integers; whether the vocabulary has them is for those to say who know it."""
    for index, item in enumerate(value):
        if type(item) is not int or item < 0:
            raise mistake("must be an integer that is not negative", *place, index)
    return tuple(value)


def _same(value: Any, fine: Any) -> bool:
    """Equality as JSON sees it: true is not 1."""
    return bool(value == fine) and isinstance(value, bool) == isinstance(fine, bool)
