"""The model's side of the seam to the step loop: `ModelRunner.execute` computes one step.

`startup.load` makes it; `engine.core` calls it once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from paceline_server.engine.batch import BlockCopy, CopyKind, SamplingParams, SequenceSlice, StepBatch
from paceline_server.errors import EngineFailed
from paceline_server.model.cache import BlockStorage
from paceline_server.model.packing import PackedBatch, SamplingBatch, pack, pack_sampling

_TIMED_COPIES = 9

Logits = Any
"""[R, vocabulary] float32, an array of numpy or a tensor of torch: whatever the model computes with."""


class StepModel(Protocol):
    """A model together with its KV cache."""

    @property
    def storage(self) -> BlockStorage:
        """The cache's blocks."""
        ...

    @property
    def on_idle(self) -> Callable[[], None] | None:
        """What it would do when there is nothing else to do, if anything."""
        ...

    def logits(self, batch: PackedBatch) -> Logits:
        """Write the KV of all T tokens; [R, vocabulary] float32 logits of the R rows that are sampled."""
        ...

    def sample(self, logits: Logits, settings: SamplingBatch) -> list[int]:
        """Draw one token a row of `logits`, which may be overwritten. See `sampler`."""
        ...


class ModelRunner:
    """A model, and nothing that outlives a step. See `engine.batch.Runner`.

    Args:
        model: with its KV cache.
        block_size: tokens in a block of it.
    """

    def __init__(self, model: StepModel, block_size: int) -> None:
        self.model = model
        self._block_size = block_size

    def execute(self, batch: StepBatch) -> list[int | None]:
        """Move blocks, write the KV of every token of the batch, and draw a token for each slice that is sampled."""
        self.model.storage.move(batch.copies)
        packed = pack(batch, self._block_size)
        tokens = self.model.sample(self.model.logits(packed), pack_sampling(batch))
        answer: list[int | None] = [None] * len(batch.slices)
        for row, token in zip(packed.sampled.tolist(), tokens, strict=True):
            answer[row] = token
        return answer

    def logits(self, batch: StepBatch) -> Logits:
        """Like `execute`, but the logits [R, vocabulary] of the R sampled slices, in float32."""
        return self.model.logits(pack(batch, self._block_size))

    def warm_up(self, batch: StepBatch) -> None:
        """Run a batch for its effects: memory is claimed, kernels are chosen, and the weights prove sound.

        Raises:
            EngineFailed: a logit is not finite.
        """
        logits = self.logits(batch)
        if not (isfinite(logits.min()) and isfinite(logits.max())):
            raise EngineFailed(
                "the warm-up pass gave logits that are not finite: the weights are damaged, "
                "or engine.dtype cannot hold the model's values (bfloat16 and float32 have the range)"
            )
        self.model.sample(logits, pack_sampling(batch))

    def copy_seconds(self) -> float:
        """Time to copy one block to host memory or back, as measured now; 0 where there are no slots."""
        storage = self.model.storage
        if not len(storage.host):
            return 0.0
        there_and_back = [BlockCopy(CopyKind.OUT, 0, 0), BlockCopy(CopyKind.IN, 0, 0)]
        times = []
        for _ in range(_TIMED_COPIES):
            begin = perf_counter()
            storage.move(there_and_back)
            times.append((perf_counter() - begin) / len(there_and_back))
        return median(times)


def largest_batches(
    max_batch_size: int, max_tokens_in_batch: int, longest: int, block_size: int
) -> tuple[StepBatch, StepBatch]:
    """The warm-up: one prefill and one decode, each as large as a step can be.

    The decoding slices share a block and overwrite each other there, which does not matter: nothing of it is kept.

    Args:
        max_batch_size: slices of the decode.
        max_tokens_in_batch: tokens of the prefill, as far as a sequence can be that long.
        longest: tokens of the longest sequence that model and pool allow.
        block_size: tokens in a block.
    """
    length = min(max_tokens_in_batch, longest)
    sampling = SamplingParams(top_p=0.9)
    prefill = SequenceSlice([0] * length, 0, range(-(-length // block_size)), sampling)
    decode = SequenceSlice([0], min(length, block_size) - 1, [0], sampling)
    return StepBatch([prefill]), StepBatch([decode] * max_batch_size)
