"""Settings dataclasses as flags: a field is a flag, its docstring the help. Used by `operator` and `adapter`."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, TypeVar

T = TypeVar("T")

_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<help>.+?)(?=^\w+(?:, \w+)*: |\Z)", re.MULTILINE | re.DOTALL)


def parse_settings(settings: type[T], prog: str, description: str, arguments: Sequence[str]) -> T:
    """Read the flags of a frozen dataclass from a command line; ends the process on a mistake, as argparse does."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    explained = _help_of(settings)
    for field in fields(settings):  # type: ignore[arg-type]  # T is a dataclass; typeshed has no bound for that
        _add(parser, field, explained[field.name])
    return settings(**vars(parser.parse_args(arguments)))


def _add(parser: argparse.ArgumentParser, field: Field[Any], explanation: str) -> None:
    flag, text = f"--{field.name.replace('_', '-')}", explanation.rstrip(".").replace("%", "%%")
    if isinstance(field.default, tuple):
        text += "; separated by commas"
        parser.add_argument(flag, type=_names, default=field.default, metavar="NAME,…", help=text)
        return
    kind = type(field.default) if field.default is not None else str
    shown = f" (default: {field.default})" if field.default not in (None, "") else ""
    parser.add_argument(flag, type=kind, default=field.default, metavar=kind.__name__.upper(), help=text + shown)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _help_of(settings: type) -> dict[str, str]:
    """Each field's explanation from the class's docstring, whose entries read `field, field: text`."""
    explained = {}
    for entry in _ENTRY.finditer(inspect.getdoc(settings) or ""):
        for name in entry["names"].split(", "):
            explained[name] = " ".join(entry["help"].split())
    return explained
