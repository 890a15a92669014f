"""Host memory for preempted sequences, and whether it pays to use it. Asked by `tables` when a sequence is thrown out.

A preempted sequence comes back by one of two ways. *Recompute*: its tokens are computed again, at the cost of a
prefill. *Swap*: its blocks are copied to host memory and back, at twice the cost of a copy. Which is cheaper depends on
the machine and on the length, since attention makes each further token dearer; both costs are measured on the spot.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.engine.steptime import StepTimeModel, pairs_of


class SwapSpace:
    """Slots of host memory, each as large as a block.

    Args:
        num_slots: how many; 0 where nothing may be swapped.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Take slots with worthless content; the caller has checked `num_free`."""
        assert count <= len(self._free), "take more slots than are free"
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Return slots that were taken."""
        self._free += slots

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless every slot is either free or held once. For tests."""
        assert sorted([*self._free, *held]) == list(range(self.num_slots)), "a slot is leaked or held twice"


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What throwing a sequence out costs by either way, in seconds of the engine.

    Attributes:
        step_time: learns from every step; knows what a recomputed token costs.
        copy_seconds: one block's copy between device and host memory, as measured at the start.
    """

    step_time: StepTimeModel
    copy_seconds: float

    def swap_is_cheaper(self, tokens: int, blocks: int) -> bool:
        """Whether copying that many blocks out and in again takes less time than computing their tokens again."""
        return self._swap_seconds(blocks) < self._recompute_seconds(tokens)

    def swap_cost_in_tokens(self, tokens: int, blocks: int) -> int:
        """How many computed tokens cost what copying these blocks does, where that is cheaper than computing all."""
        return round(tokens * self._swap_seconds(blocks) / self._recompute_seconds(tokens))

    def _swap_seconds(self, blocks: int) -> float:
        return 2 * blocks * self.copy_seconds

    def _recompute_seconds(self, tokens: int) -> float:
        fixed = self.step_time.seconds(0, 0)  # of a step that runs anyway
        return self.step_time.seconds(tokens, pairs_of(0, tokens)) - fixed
