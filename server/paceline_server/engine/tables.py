"""Which blocks a sequence holds: placing or forking it, growing it, booking, parking it, taking its blocks back.

The scheduler decides who runs; it calls `BlockTables` for what that means for the blocks. Contents are moved by the
runner: a table collects the copies in the order in which they were decided, and the step carries them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline_server.engine.batch import BlockCopy, CopyKind
from paceline_server.engine.blocks import BlockManager
from paceline_server.engine.inflight import PromisedBlocks
from paceline_server.engine.sequence import Parked, Sequence
from paceline_server.engine.swapping import PreemptionCosts, SwapSpace


@dataclass(slots=True)
class TableTotals:
    """Counts since the start."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


class BlockTables:
    """Gives sequences their blocks.

    Args:
        blocks: the device's.
        swap: host memory for preempted sequences; None is none.
        costs: of preemption; None where nothing is swapped.
    """

    def __init__(
        self, blocks: BlockManager, swap: SwapSpace | None = None, costs: PreemptionCosts | None = None
    ) -> None:
        self.blocks = blocks
        self.totals = TableTotals()
        self._swap = swap or SwapSpace(0)
        self._costs = costs
        self._promised = PromisedBlocks()
        self._groups: dict[str, list[Sequence]] = {}  # those that hold blocks, by their group
        self._copies: list[BlockCopy] = []

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting or new sequence that the prefix cache would bring now."""
        return len(self._cached_prefix(sequence)) * self.blocks.block_size

    def waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute the block that this one needs next."""
        if not len(self._promised):
            return False
        cached = len(self._cached_prefix(sequence))
        if cached == self._cacheable(sequence):
            return False
        return sequence.digests(cached + 1, self.blocks.block_size)[cached] in self._promised

    def place(self, sequence: Sequence, reserve: int) -> bool:
        """Give a waiting sequence its blocks, with what is known of their content; False where they do not fit.

        Args:
            sequence: without blocks; it has them, and `num_computed`, after.
            reserve: blocks that must stay free.
        """
        donor = self._donor(sequence)
        prefix = donor.block_table[: self._shared_with(sequence)] if donor else self._cached_prefix(sequence)
        fresh = self.blocks.blocks_for(sequence.num_tokens) - len(prefix)
        if self.blocks.num_free_without(prefix) < fresh + reserve:
            return False
        self.blocks.hold(prefix)
        sequence.block_table = prefix + self.blocks.allocate(fresh)
        if donor is None:
            self._fill(sequence, len(prefix))
        else:
            self._fork(sequence, donor)
        if self.blocks.prefix_caching:
            self._promise(sequence)
        if sequence.group is not None:
            self._groups.setdefault(sequence.group, []).append(sequence)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Make room for all known tokens of a running sequence; False where no block is free."""
        needed = self.blocks.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        if needed > self.blocks.num_free:
            return False
        if needed > 0:
            sequence.block_table += self.blocks.allocate(needed)
        return True

    def book(self, sequence: Sequence, count: int) -> None:
        """Note that `count` more tokens of a sequence are computed; blocks that became full can be shared."""
        full_before = sequence.num_computed // self.blocks.block_size
        sequence.num_computed += count
        self._publish(sequence, full_before)

    def suspend(self, sequence: Sequence) -> None:
        """Take the blocks of a sequence that is preempted; its KV goes to host memory where that is cheaper."""
        parked = self._park(sequence)
        self.release(sequence)
        sequence.parked = parked
        sequence.num_computed = 0

    def release(self, sequence: Sequence) -> None:
        """Take back everything that a sequence holds."""
        self._promised.break_all(sequence.request_id)
        self._leave_group(sequence)
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        self._free_parked(sequence)

    def take_copies(self) -> list[BlockCopy]:
        """The copies decided since the last call, in their order: the next step must do them."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self, running: list[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raise AssertionError unless blocks, slots and sequences agree. For tests, after every step."""
        self.blocks.check_integrity(sequence.block_table for sequence in running)
        held: list[int] = []
        grouped = {sequence.request_id for members in self._groups.values() for sequence in members}
        assert grouped <= {sequence.request_id for sequence in running}, "a stale group"
        for sequence in running:
            assert 0 <= sequence.num_computed < sequence.num_tokens, "a running sequence has nothing to compute"
            assert len(sequence.block_table) >= self.blocks.blocks_for(sequence.num_computed), "KV without a block"
            assert sequence.parked is None, "a running sequence is parked"
        assert len(self._promised) <= sum(len(sequence.block_table) for sequence in running), "a stale promise"
        for sequence in waiting:
            assert not sequence.block_table, "a waiting sequence holds blocks"
            assert sequence.num_computed == 0, "a waiting sequence has KV"
            if sequence.parked is not None:
                held += sequence.parked.slots
                assert len(sequence.parked.slots) == self.blocks.blocks_for(sequence.parked.tokens)
        self._swap.check_integrity(held)

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        if not self.blocks.prefix_caching:
            return []
        return self.blocks.find_prefix(sequence.digests(self._cacheable(sequence), self.blocks.block_size))

    def _cacheable(self, sequence: Sequence) -> int:
        """Blocks that may come from the cache: full ones, but the last token is computed for its logits."""
        return (sequence.num_tokens - 1) // self.blocks.block_size

    def _fill(self, sequence: Sequence, cached: int) -> None:
        """Note what the cached blocks at the front of a new table hold, and bring back what is parked."""
        sequence.num_computed = cached * self.blocks.block_size
        self.totals.prefix_queried_tokens += sequence.num_tokens
        self.totals.prefix_hit_tokens += sequence.num_computed
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
        self._unpark(sequence, cached)

    def _donor(self, sequence: Sequence) -> Sequence | None:
        """A running sequence of the same group whose prompt is computed, where forking it brings most."""
        members = self._groups.get(sequence.group, ()) if sequence.group is not None else ()
        prompt = len(sequence.request.prompt_token_ids)
        if sequence.parked is not None or self.cached_tokens(sequence) >= prompt:
            return None
        return next((one for one in members if one.num_computed >= prompt), None)

    def _shared_with(self, sequence: Sequence) -> int:
        """Blocks of a prompt that its samples share: all before that of its last token, which each computes anew."""
        return (len(sequence.request.prompt_token_ids) - 1) // self.blocks.block_size

    def _fork(self, sequence: Sequence, donor: Sequence) -> None:
        """Copy the block that both would write to; what the donor wrote behind the prompt is overwritten in time."""
        shared, prompt = self._shared_with(sequence), len(sequence.request.prompt_token_ids)
        self._copies.append(BlockCopy(CopyKind.WITHIN, donor.block_table[shared], sequence.block_table[shared]))
        sequence.num_computed = min(prompt, sequence.num_tokens - 1)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed

    def _leave_group(self, sequence: Sequence) -> None:
        members = self._groups.get(sequence.group or "", [])
        if sequence in members:  # not so while it waits, nor in a batch by request, which forks nothing
            members.remove(sequence)
            if not members:
                del self._groups[sequence.group or ""]

    def _promise(self, sequence: Sequence) -> None:
        size = self.blocks.block_size
        digests = sequence.digests(sequence.num_tokens // size, size)
        self._promised.promise(sequence.request_id, digests[sequence.num_computed // size :])

    def _publish(self, sequence: Sequence, full_before: int) -> None:
        size = self.blocks.block_size
        full = sequence.num_computed // size
        if not self.blocks.prefix_caching or full == full_before:
            return
        digests = sequence.digests(full, size)
        for index in range(full_before, full):
            self.blocks.publish(sequence.block_table[index], digests[index])
            self._promised.keep(sequence.request_id, digests[index])

    def _park(self, sequence: Sequence) -> Parked | None:
        """Copy a running sequence's KV to host memory; None where there is no room, or computing it is cheaper."""
        blocks = self.blocks.blocks_for(sequence.num_computed)
        if self._costs is None or not 0 < blocks <= self._swap.num_free:
            return None
        if not self._costs.swap_is_cheaper(sequence.num_computed, blocks):
            return None
        slots = self._swap.take(blocks)
        self._copies += map(BlockCopy, [CopyKind.OUT] * blocks, sequence.block_table, slots)
        self.totals.swapped_out_blocks += blocks
        return Parked(slots, sequence.num_computed)

    def _unpark(self, sequence: Sequence, cached: int) -> None:
        """Copy parked KV back into the blocks that the prefix cache did not bring."""
        parked = sequence.parked
        if parked is not None and parked.tokens > sequence.num_computed:
            slots = parked.slots[cached:]
            self._copies += map(BlockCopy, [CopyKind.IN] * len(slots), slots, sequence.block_table[cached:])
            self.totals.swapped_in_blocks += len(slots)
            sequence.num_computed = parked.tokens
            self._publish(sequence, cached)
        self._free_parked(sequence)

    def _free_parked(self, sequence: Sequence) -> None:
        if sequence.parked is not None:
            self._swap.give_back(sequence.parked.slots)
            sequence.parked = None
