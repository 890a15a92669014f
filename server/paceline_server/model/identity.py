"""Whose KV it is: a digest that is equal where two engines compute equal blocks. Called by `startup`.

It is part of every block's digest and of every block file, so that the KV of one model never serves another, even
under one name. The files' bytes decide, not their name or revision.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from paceline_server.model.store import weight_files

_HEADER_BYTES = 1 << 20
"""Names, shapes and places of the tensors stand at a file's beginning."""


def kv_identity(folder: Path, facts: tuple[object, ...], *, every_byte: bool) -> str:
    """32 hexadecimal digits.

    Args:
        folder: the model's.
        facts: whatever else the content of a block depends on: number format, back end, layout.
        every_byte: read the weights to their ends, about a second a gigabyte, so that a model of the same shape in the
            same folder is told apart; else only their beginnings and sizes. Needed where blocks outlive the process.
    """
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    for name in ("config.json", *weight_files(folder)):
        path = folder / name
        digest.update(f"\0{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_HEADER_BYTES):
                digest.update(chunk)
                if not every_byte:
                    break
    return digest.hexdigest()
