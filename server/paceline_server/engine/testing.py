"""Fakes of the engine's seams, for tests: a runner without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from paceline_server.engine.batch import SequenceSlice, StepBatch
from paceline_server.engine.interface import ModelInfo


def model_info(*, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 256, vocab: int = 50) -> ModelInfo:
    """The info of a pretended model, whose end-of-sequence token is 0."""
    return ModelInfo(
        folder="/nonexistent",
        max_model_len=max_model_len,
        vocab_size=vocab,
        eos_token_ids=(0,),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype="float32",
        device="cpu",
        attention_backend="fake",
    )


def expected_tokens(prompt: Sequence[int], count: int, vocab: int = 50) -> list[int]:
    """What `FakeRunner` generates for a prompt alone: the reference that no scheduling may change."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_next_token(tokens, vocab))
    return tokens[len(prompt) :]


class FakeRunner:
    """A model whose KV cache holds the tokens themselves.

    It writes each token at its block and offset and draws the next token from everything it reads back through the
    block table. A wrong, stale or shared block therefore changes the output, as it would with a real model.

    Attributes:
        batches: every batch that was executed.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._cache: list[list[int | None]] = [[None] * info.block_size for _ in range(info.num_blocks)]
        self.batches: list[StepBatch] = []

    def execute(self, batch: StepBatch) -> list[int | None]:
        """Write all slices, then read and sample, as one forward pass does."""
        self.batches.append(batch)
        for piece in batch.slices:
            for offset, token in enumerate(piece.token_ids):
                block, place = self._locate(piece, piece.start + offset)
                self._cache[block][place] = token
        return [self._sample(piece) for piece in batch.slices]

    def _sample(self, piece: SequenceSlice) -> int | None:
        if piece.sampling is None:
            return None
        tokens = []
        for position in range(piece.start + len(piece.token_ids)):
            block, place = self._locate(piece, position)
            token = self._cache[block][place]
            assert token is not None, f"KV of position {position} was never written"
            tokens.append(token)
        return _next_token(tokens, self._info.vocab_size, banned=piece.banned_token_ids)

    def _locate(self, piece: SequenceSlice, position: int) -> tuple[int, int]:
        return piece.block_table[position // self._info.block_size], position % self._info.block_size


def _next_token(tokens: Sequence[int], vocab: int, banned: Sequence[int] = ()) -> int:
    digest = hashlib.blake2b(repr(list(tokens)).encode(), digest_size=8).digest()
    token = int.from_bytes(digest, "big") % vocab
    while token in banned:
        token = (token + 1) % vocab
    return token
