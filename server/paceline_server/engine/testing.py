"""Fakes of the engine's seams, for tests: a runner without a model."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from paceline_server.engine.batch import BlockCopy, CopyKind, SequenceSlice, StepBatch
from paceline_server.engine.interface import ModelInfo
from paceline_server.engine.offload import FileAction, FileJob, FileResult


def model_info(
    *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 256, vocab: int = 50, **more: Any
) -> ModelInfo:
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
        block_bytes=block_size,
        **more,
    )


def expected_tokens(prompt: Sequence[int], count: int, vocab: int = 50) -> list[int]:
    """What `FakeRunner` generates for a prompt alone: the reference that no scheduling may change."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_next_token(tokens, vocab))
    return tokens[len(prompt) :]


_Block = list[tuple[int, int] | None]
"""Position and token of each place; None where nothing was written."""


class FakeRunner:
    """A model whose KV cache holds the tokens themselves, each with its position.

    It writes each token at its block and offset and draws the next token from everything it reads back through the
    block table. A wrong, stale or shared block, or one that was copied to the wrong place or too late, therefore
    changes the output, as it would with a real model.

    Attributes:
        batches: every batch that was executed.
        host: slots of host memory.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self._cache: list[_Block] = [[None] * info.block_size for _ in range(info.num_blocks)]
        self.host: dict[int, _Block] = {}
        self.batches: list[StepBatch] = []

    def execute(self, batch: StepBatch) -> list[int | None]:
        """Copy, write all slices, then read and sample, as one forward pass does."""
        self.batches.append(batch)
        for copy in batch.copies:
            self._copy(copy)
        for piece in batch.slices:
            for offset, token in enumerate(piece.token_ids):
                position = piece.start + offset
                block, place = self._locate(piece, position)
                self._cache[block][place] = position, token
        return [self._sample(piece) for piece in batch.slices]

    def _sample(self, piece: SequenceSlice) -> int | None:
        if piece.sampling is None:
            return None
        tokens = []
        for position in range(piece.start + len(piece.token_ids)):
            block, place = self._locate(piece, position)
            mark = self._cache[block][place]
            assert mark is not None, f"KV of position {position} was never written"
            assert mark[0] == position, f"KV of position {position} is that of {mark[0]}"
            tokens.append(mark[1])
        return _next_token(tokens, self.info.vocab_size, banned=piece.banned_token_ids)

    def _copy(self, copy: BlockCopy) -> None:
        source = self.host if copy.kind is CopyKind.IN else self._cache
        target = self.host if copy.kind is CopyKind.OUT else self._cache
        target[copy.target] = list(source[copy.source])

    def _locate(self, piece: SequenceSlice, position: int) -> tuple[int, int]:
        return piece.block_table[position // self.info.block_size], position % self.info.block_size


class TimedRunner(FakeRunner):
    """A `FakeRunner` whose steps take time, on a clock of its own: called, it tells the seconds.

    Args:
        fixed: seconds of a step.
        by_token: seconds of each of its tokens.

    Attributes:
        copies: block copies so far, by kind.
    """

    def __init__(self, info: ModelInfo, *, fixed: float = 0.010, by_token: float = 0.001) -> None:
        super().__init__(info)
        self.now = 0.0
        self.copies = dict.fromkeys(CopyKind, 0)
        self._fixed = fixed
        self._by_token = by_token

    def __call__(self) -> float:
        """The time."""
        return self.now

    def execute(self, batch: StepBatch) -> list[int | None]:
        """Let time go by, then do what a runner does."""
        self.now += self._fixed + self._by_token * batch.num_tokens
        for copy in batch.copies:
            self.copies[copy.kind] += 1
        return super().execute(batch)


class FakeFiles:
    """A disk beside a `FakeRunner`; implements `offload.BlockFiles`.

    Args:
        runner: whose host memory is written and read.
        delay: calls of `results` that a job takes.

    Attributes:
        blocks: contents by digest. What is taken out or replaced by None is missing or damaged.
    """

    def __init__(self, runner: FakeRunner, delay: int = 1) -> None:
        self.blocks: dict[bytes, _Block | None] = {}
        self._runner = runner
        self._delay = delay
        self._pending: list[tuple[int, FileResult]] = []
        self._calls = 0

    def stored(self) -> list[bytes]:
        """Nothing is there at the start, unless a test puts it there."""
        return list(self.blocks)

    def begin(self, job: FileJob) -> None:
        """Do it at once, and tell later."""
        ok = True
        if job.action is FileAction.DELETE:
            self.blocks.pop(job.digest, None)
            return
        assert job.slot is not None
        if job.action is FileAction.WRITE:
            self.blocks[job.digest] = list(self._runner.host[job.slot])
        else:
            content = self.blocks.get(job.digest)
            ok = content is not None
            self._runner.host[job.slot] = content or [None] * self._runner.info.block_size
        self._pending.append((self._calls + self._delay, FileResult(job, ok)))

    def results(self) -> list[FileResult]:
        """What is due."""
        self._calls += 1
        due = [result for call, result in self._pending if call <= self._calls]
        self._pending = [(call, result) for call, result in self._pending if call > self._calls]
        return due


def _next_token(tokens: Sequence[int], vocab: int, banned: Sequence[int] = ()) -> int:
    digest = hashlib.blake2b(repr(list(tokens)).encode(), digest_size=8).digest()
    token = int.from_bytes(digest, "big") % vocab
    while token in banned:
        token = (token + 1) % vocab
    return token


class FakeEncoder:
    """A model whose vector of a text is the sum of its tokens, and how many there are.

    Attributes:
        batches: lengths of the texts of every batch.
    """

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def encode(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        """One vector of two numbers a text."""
        self.batches.append([len(text) for text in texts])
        return [fake_vector(text) for text in texts]


def fake_vector(text: Sequence[int]) -> bytes:
    """What `FakeEncoder` makes of a text, whatever shares its batch."""
    return struct.pack("<2f", sum(text), len(text))
