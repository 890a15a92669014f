"""The prefixes that requests share most: counted as they come, bounded, to be handed to a new replica.

`core` notes every prompt. A node is one full block of a prefix, known by its chained digest, so that prompts under
different salts never meet. Which tokens a node stands for must be kept, because a digest cannot be computed back;
nothing is handed out that was asked for only once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_server.engine.interface import HotPrefix

_FADE_EVERY = 4096
"""Prompts after which all counts are halved: what was hot this morning makes room."""


@dataclass(slots=True)
class _Node:
    """A block of a prefix, and the digest of the one before it (None for the first)."""

    parent: bytes | None
    root: bytes
    token_ids: tuple[int, ...]
    depth: int
    uses: int = 0


class HotPrefixes:
    """Counts prefixes by blocks.

    Args:
        block_size: tokens in a block.
        max_nodes: blocks that are remembered; the least recently used are forgotten.
        max_depth: blocks of a prompt that are counted, from its beginning.
    """

    def __init__(self, block_size: int, max_nodes: int = 8192, max_depth: int = 512) -> None:
        self._block_size = block_size
        self._max_nodes = max_nodes
        self._max_depth = min(max_depth, max_nodes)
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self._noted = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def note(self, token_ids: Sequence[int], root: bytes, digests: Sequence[bytes]) -> None:
        """Count a prompt.

        Args:
            token_ids: of the prompt.
            root: digest that the chain starts from.
            digests: of its full blocks.
        """
        self._fade()
        counted = digests[: self._max_depth]
        for depth, digest in enumerate(counted):
            node = self._nodes.get(digest)
            if node is None:
                begin = depth * self._block_size
                block = tuple(token_ids[begin : begin + self._block_size])
                node = self._nodes[digest] = _Node(digests[depth - 1] if depth else None, root, block, depth)
            node.uses += 1
        for digest in reversed(counted):  # the tail is forgotten before what it depends on
            self._nodes.move_to_end(digest)
        while len(self._nodes) > self._max_nodes:
            self._nodes.popitem(last=False)

    def hottest(self, limit: int, max_tokens: int) -> list[HotPrefix]:
        """At most `limit` prefixes of at most `max_tokens` tokens in all, those first that save most when shared.

        One that is the beginning of another listed one is not listed again.
        """
        shared = [(node.uses * (node.depth + 1), digest) for digest, node in self._nodes.items() if node.uses > 1]
        covered: set[bytes] = set()
        found: list[HotPrefix] = []
        for _, digest in sorted(shared, reverse=True):
            if len(found) == limit:
                break
            tokens = self._block_size * (self._nodes[digest].depth + 1)
            chain = [] if digest in covered or tokens > max_tokens else self._chain(digest)
            if not chain:
                continue
            max_tokens -= tokens
            covered |= {one for one, _ in chain}
            token_ids = tuple(token for _, node in reversed(chain) for token in node.token_ids)
            found.append(HotPrefix(chain[0][1].root, token_ids, self._nodes[digest].uses))
        return [one for one in found if not self._is_beginning(one, found)]

    def _chain(self, digest: bytes) -> list[tuple[bytes, _Node]]:
        """The nodes of a prefix, last first; nothing where one of them is forgotten."""
        chain: list[tuple[bytes, _Node]] = []
        link: bytes | None = digest
        while link is not None:
            node = self._nodes.get(link)
            if node is None:
                return []
            chain.append((link, node))
            link = node.parent
        return chain

    def _is_beginning(self, one: HotPrefix, found: list[HotPrefix]) -> bool:
        size = len(one.token_ids)
        return any(
            other is not one and other.root == one.root and other.token_ids[:size] == one.token_ids for other in found
        )

    def _fade(self) -> None:
        self._noted += 1
        if self._noted % _FADE_EVERY == 0:
            for node in self._nodes.values():
                node.uses //= 2
