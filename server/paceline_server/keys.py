"""API keys: what may be one, and what is kept of it. Used by the configuration, the gateway and `hash-key`.

A key is hashed the moment it is read, by SHA-256 without a salt and without stretching: those make guessing slow where
secrets are chosen by people. Keys are drawn at random, and of sixteen characters or more there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import re

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
HASH_PATTERN = r"^sha256:[0-9a-f]{64}$"

_PRINTABLE = re.compile(r"[!-~]+")
_HASH = re.compile(HASH_PATTERN)


def hash_key(key: str) -> str:
    """What is kept of a key.

    Raises:
        ValueError: it is too short, too long, or has characters that a header cannot carry; the key is not repeated.
    """
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        raise ValueError(f"a key has {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters, this one has {len(key)}")
    if not _PRINTABLE.fullmatch(key):
        raise ValueError("a key is of printable ASCII characters without spaces, so that a header can carry it")
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def hashes_of(text: str) -> frozenset[str]:
    """The keys of a file or a variable, hashed: one a line, plain or as a hash; empty lines and `#` comments are none.

    Raises:
        ValueError: a line is neither, with the number of the line and without its text.
    """
    found = set()
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        try:
            found.add(entry if _HASH.fullmatch(entry) else hash_key(entry))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return frozenset(found)
