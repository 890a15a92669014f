"""Render docs/reference/settings.md from the configuration's own descriptions.

    python scripts/settings_reference.py            prints it
    python scripts/settings_reference.py --write    writes it

`make generate` writes it and a unit test holds the file to the code.
"""

from __future__ import annotations

import argparse
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline_server.config import ServerConfig

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"

_HEADER = """# Engine configuration file

The file that `paceline-server serve --config FILE` reads: YAML, unknown keys refused, every mistake reported at once
with its path. An LLMService's `spec.engine` carries the same keys in camelCase (`maxModelLen` for
`engine.max_model_len`); the operator renders them into this file.

Generated from `server/paceline_server/config.py`; change the descriptions there and run `make generate`.
"""


def render() -> str:
    """The page as Markdown."""
    return "\n".join([_HEADER, *_sections(ServerConfig, ())])


def _sections(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    groups = {name: field for name, field in model.model_fields.items() if _is_group(field)}
    settings = {name: field for name, field in model.model_fields.items() if name not in groups}
    lines: list[str] = []
    if settings:
        lines += [f"## `{'.'.join(path)}`", "", (model.__doc__ or "").strip(), ""]
        lines += ["| key | type | default | what it does |", "|---|---|---|---|"]
        lines += [_row(name, field) for name, field in settings.items()]
        lines.append("")
    for name, field in groups.items():
        assert isinstance(field.annotation, type)
        lines += _sections(field.annotation, (*path, name))
    return lines


def _is_group(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _row(name: str, field: FieldInfo) -> str:
    default = "**required**" if field.is_required() else f"`{_yaml(field.get_default(call_default_factory=True))}`"
    bounds = [_bound(item) for item in field.metadata if _bound(item)]
    kind = ", ".join([_kind(field.annotation), *bounds])
    return f"| `{name}` | {kind} | {default} | {field.description} |"


def _kind(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if annotation is None or annotation is types.NoneType:
        return "null"
    if origin is Literal:
        return " or ".join(f"`{_yaml(value)}`" for value in typing.get_args(annotation))
    if origin is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        inner = [item for field in metadata for item in getattr(field, "metadata", [field])]
        return ", ".join([_kind(base), *(_bound(item) for item in inner if _bound(item))])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in typing.get_args(annotation))
    if origin is tuple:
        return "list of text"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


def _bound(item: Any) -> str:
    for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        if (limit := getattr(item, name, None)) is not None:
            return f"{sign} {limit}"
    return ""


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description="Render docs/reference/settings.md")
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        TARGET.write_text(render(), encoding="utf-8")
    else:
        print(render())


if __name__ == "__main__":
    main()
