"""Reads the text-side files of a model's folder, which are somebody else's. Called by `templates` and `tokenizer`.

A file that is not what it should be ends the start with its path and what is wrong with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline_server.errors import ModelUnsupported


def read_text(path: Path) -> str | None:
    """The file's text, or None where there is no such file.

    Raises:
        ModelUnsupported: it is not UTF-8, or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ModelUnsupported(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise ModelUnsupported(f"{path} cannot be read: {error.strerror}") from None


def read_object(path: Path) -> dict[str, Any] | None:
    """The file's JSON object, or None where there is no such file.

    Raises:
        ModelUnsupported: it is not UTF-8, not JSON or no object, or cannot be read.
    """
    text = read_text(path)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelUnsupported(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelUnsupported(f"{path} must hold a JSON object, not {_kind(content)}")
    return content


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return "a list" if isinstance(value, list) else type(value).__name__
