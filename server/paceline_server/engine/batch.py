"""What one step computes, and the seam between the step loop and the model: `Runner.execute`.

The step loop builds a `StepBatch` from the scheduler's decision; the model's runner turns it into packed tensors.
Plain integers only: the scheduler's side of the seam imports no torch. What has to be moved between blocks of the
device and slots of host memory is part of a step too, so that the order of all that touches a block is in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence's next token is drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: 0 is off.
        min_p: smallest probability relative to the most likely token's, in [0, 1]; 0 is off.
        seed: key of the sequence's random stream; with the position it fixes the draw, whatever shares the batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that a step computes.

    Attributes:
        token_ids: the n >= 1 tokens to compute.
        start: position of the first of them; the KV of positions [0, start) is already in the cache.
        block_table: physical block of each logical block, long enough for positions [0, start + n).
        sampling: draw the token at position start + n from the last row; None where no logits are wanted.
        banned_token_ids: never drawn this step (stop tokens before min_tokens is reached).
        deterministic: bit-equal whatever else the step computes, and however the sequence is cut into steps.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None
    banned_token_ids: Sequence[int] = ()
    deterministic: bool = False


class CopyKind(Enum):
    """From where to where a block's content goes."""

    WITHIN = "within"
    """From a block of the device to another one."""
    OUT = "out"
    """From a block of the device to a slot of host memory."""
    IN = "in"
    """From a slot of host memory to a block of the device."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block's content, the keys and values of all layers, copied whole.

    Attributes:
        source, target: blocks or slots, as `kind` says.
    """

    kind: CopyKind
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All slices of a step, in the order of the answer.

    Attributes:
        copies: done one after the other before any slice is computed; a later one may reuse what an earlier one freed.
    """

    slices: Sequence[SequenceSlice]
    copies: Sequence[BlockCopy] = ()

    @property
    def num_tokens(self) -> int:
        """Packed tokens T of the step."""
        return sum(len(piece.token_ids) for piece in self.slices)


class Encoder(Protocol):
    """Embeds texts."""

    def encode(self, texts: Sequence[Sequence[int]]) -> Sequence[bytes]:
        """One vector a text, little-endian float32, whatever else shares the batch."""
        ...


class Runner(Protocol):
    """Runs the model over one batch."""

    def execute(self, batch: StepBatch) -> Sequence[int | None]:
        """Copy blocks, then write the KV of every token of the batch and sample where asked.

        Returns:
            One entry a slice: the sampled token id, or None where `sampling` is None.
        """
        ...
