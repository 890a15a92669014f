"""Prefixes that are being computed now. The scheduler lets those that share one wait for the first to have computed it.

Ten requests with the same long system prompt that come at once would each compute it: the prefix cache knows a block
only when it is done. This book knows the blocks that are promised: full blocks of running sequences, by their digests.
"""

from __future__ import annotations

from collections.abc import Sequence


class PromisedBlocks:
    """Digests that running sequences are going to publish, and who."""

    def __init__(self) -> None:
        self._by_owner: dict[str, set[bytes]] = {}
        self._owners: dict[bytes, int] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._owners

    def __len__(self) -> int:
        return len(self._owners)

    def promise(self, owner: str, digests: Sequence[bytes]) -> None:
        """A sequence starts to compute these blocks."""
        assert owner not in self._by_owner, "a sequence promises once"
        self._by_owner[owner] = set(digests)
        for digest in self._by_owner[owner]:
            self._owners[digest] = self._owners.get(digest, 0) + 1

    def keep(self, owner: str, digest: bytes) -> None:
        """A sequence has computed a block; one that it had not promised is no error."""
        promised = self._by_owner.get(owner)
        if promised is not None and digest in promised:
            promised.remove(digest)
            self._release(digest)

    def break_all(self, owner: str) -> None:
        """A sequence is gone, or has kept all its promises."""
        for digest in self._by_owner.pop(owner, ()):
            self._release(digest)

    def _release(self, digest: bytes) -> None:
        self._owners[digest] -= 1
        if not self._owners[digest]:
            del self._owners[digest]
