"""A file of API keys: checked before a server is started that would refuse it. Used by `secrets`.

The rules are the server's, which shares no code with us; tests/contract holds both to the same answers.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_MAX_BYTES = 1 << 20
_KEY = re.compile(r"[!-~]{16,512}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


def entries(path: Path) -> list[str]:
    """The keys of a file, plain or hashed as they stand there: one a line, without comments.

    Raises:
        ValueError: the file cannot be read or holds no keys, or a line is none; what stands there is not repeated.
    """
    lines = [line.strip() for line in _text(path).splitlines()]
    found = [(number, line) for number, line in enumerate(lines, start=1) if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"{path} holds no keys; write them there, one a line")
    for number, line in found:
        if not _KEY.fullmatch(line):
            raise ValueError(
                f"{path}, line {number}: a key has 16 to 512 characters of printable ASCII without spaces, "
                "and this line is none"
            )
    return [line for _, line in found]


def is_hash(entry: str) -> bool:
    """Whether an entry is the hash of a key, with which nobody can call."""
    return _HASH.fullmatch(entry) is not None


def digest(entry: str) -> str:
    """What the server knows a key by, whichever way it stands in the file."""
    return entry if is_hash(entry) else f"sha256:{hashlib.sha256(entry.encode()).hexdigest()}"


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} is larger than a file of keys can be (1 MiB)")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
