"""The paged KV cache's bookkeeping: which block belongs to whom, and which blocks hold reusable prefixes.

Integers only; the tensors live in the runner. `tables` hands them out, and `request_level` its scratch; `admission`,
`urgency` and `core` count. A block is in one of three states: *held* (reference count >= 1), *cached* (count 0, its
content still indexed by its hash, evictable) or *blank* (count 0, content worthless). Cached and blank blocks form one
list in least-recently-used order, linked through arrays so that taking a cached block out of its middle is O(1).

Prefix caching follows the chained block hash of vLLM's automatic prefix caching: a full block is known by the digest
of its predecessor's digest and its own tokens, so equal digests mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

_DIGEST_BYTES = 16


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block: blake2b over the predecessor's digest and this block's tokens.

    Args:
        parent: the predecessor's digest; for the first block the root, which carries the extra keys (`root_hash`).
        token_ids: the block's tokens, `block_size` of them.
    """
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


def root_hash(*extra_keys: str) -> bytes:
    """Digest that starts a chain; sequences share cached blocks only under equal extra keys (such as a cache salt).

    Each key goes in with its length: a salt of the client's choice must not spell two keys.
    """
    parts = (f"{len(key)}:{key}" for key in extra_keys)
    return hashlib.blake2b("".join(parts).encode(), digest_size=_DIGEST_BYTES).digest()


class FreeList:
    """All blocks with reference count 0, least recently used first; every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self._head = num_blocks  # index of the sentinel; its neighbours are the list's ends
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]
        self._size = num_blocks

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._head]
        while block != self._head:
            yield block
            block = self._next[block]

    def push(self, block: int) -> None:
        """Add a block as the most recently used one."""
        last = self._previous[self._head]
        self._next[last], self._previous[block] = block, last
        self._next[block], self._previous[self._head] = self._head, block
        self._size += 1

    def push_first(self, block: int) -> None:
        """Add a block as the first one to be reused: its content is worthless."""
        first = self._next[self._head]
        self._previous[first], self._next[block] = block, first
        self._previous[block], self._next[self._head] = self._head, block
        self._size += 1

    def remove(self, block: int) -> None:
        """Take out a given block, wherever it stands."""
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._size -= 1

    def pop(self) -> int:
        """Take out the least recently used block."""
        block = self._next[self._head]
        assert block != self._head, "pop from an empty free list"
        self.remove(block)
        return block


class BlockManager:
    """Hands out blocks of the KV pool.

    Args:
        num_blocks: blocks of the pool, >= 1.
        block_size: tokens in a block, >= 1.
        prefix_caching: keep the content of freed blocks for prompts that share it.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free = FreeList(num_blocks)
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self.on_evict: Callable[[int, bytes], None] | None = None
        """Told of a cached block, and its digest, when it is about to be handed out for something else."""

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def block_of(self, digest: bytes) -> int | None:
        """The block that is indexed under a digest; it is not held yet."""
        return self._cached.get(digest)

    def num_free_without(self, blocks: Iterable[int]) -> int:
        """Blocks that could still be handed out after the given cached ones were held."""
        return len(self._free) - sum(1 for block in blocks if self._references[block] == 0)

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of the given blocks somebody holds."""
        return sum(1 for block in blocks if self._references[block] > 0)

    def num_freed_by(self, blocks: Iterable[int]) -> int:
        """Blocks of a sequence's table that nobody else holds: releasing it would free them."""
        return sum(1 for block in blocks if self._references[block] == 1)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block: a sequence starts to use a cached prefix."""
        for block in blocks:
            if self._references[block] == 0:
                self._free.remove(block)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with worthless content; the caller has checked `num_free`."""
        assert count <= len(self._free), "allocate more blocks than are free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._references[block] = 1
        return taken

    def publish(self, block: int, digest: bytes) -> None:
        """Index a held block, now full and computed, for reuse. The first block with a digest stays the indexed one."""
        if self.prefix_caching and self._digests[block] is None and digest not in self._cached:
            self._digests[block] = digest
            self._cached[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a sequence's table.

        The tail goes back first: a prefix's later blocks are evicted before the earlier ones on which they depend.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._digests[block] is None:
                    self._free.push_first(block)
                else:
                    self._free.push(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the books agree with the block tables of all living sequences. For tests."""
        expected = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block in table:
                expected[block] += 1
        assert expected == self._references, "reference counts differ from the tables"
        free = list(self._free)
        assert len(free) == len(set(free)) == len(self._free), "the free list is broken"
        assert sorted(free) == [b for b in range(self.num_blocks) if self._references[b] == 0], "leaked or stale block"
        assert {d: b for b, d in enumerate(self._digests) if d is not None} == self._cached, "the index is stale"

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            if self.on_evict is not None:
                self.on_evict(block, digest)
            del self._cached[digest]
            self._digests[block] = None
