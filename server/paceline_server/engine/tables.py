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
from paceline_server.engine.offload import OffloadTier
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
        tier: keeps cached blocks that the device evicts; None lets them go.
    """

    def __init__(
        self,
        blocks: BlockManager,
        swap: SwapSpace | None = None,
        costs: PreemptionCosts | None = None,
        tier: OffloadTier | None = None,
    ) -> None:
        self.blocks = blocks
        self.tier = tier
        self.totals = TableTotals()
        self._swap = swap or SwapSpace(0)
        self._costs = costs
        self._promised = PromisedBlocks()
        self._groups: dict[str, list[Sequence]] = {}  # those that hold blocks, by their group
        self._copies: list[BlockCopy] = []
        self._returning: list[bytes] = []  # blocks in host memory that the placement under way is about to copy back
        if tier is not None:
            blocks.on_evict = self._offload

    @property
    def fetching(self) -> bool:
        """Whether somebody may wait for a block from disk."""
        return self.tier is not None and self.tier.fetching

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting or new sequence that the prefix cache would bring now."""
        return len(self._cached_prefix(sequence)) * self.blocks.block_size

    def cached_blocks(self, sequence: Sequence) -> set[int]:
        """Blocks of the device that hold the prefix of a waiting sequence now."""
        return {block for block in self._cached_prefix(sequence) if block is not None}

    def runs_sibling(self, sequence: Sequence) -> bool:
        """Whether another answer to the same prompt runs."""
        return sequence.group is not None and sequence.group in self._groups

    def waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether the block that this sequence needs next is about to come: from a running one, or from disk."""
        if not len(self._promised) and self.tier is None:
            return False
        found, digests = len(self._cached_prefix(sequence)), self._digests(sequence)
        missing = digests[found:]
        if not missing or missing[0] in self._promised:
            return bool(missing)
        tier = self.tier
        return tier is not None and tier.is_patient(sequence.disk_wait, found) and tier.fetch(missing, digests)

    def place(self, sequence: Sequence, reserve: int) -> bool:
        """Give a waiting sequence its blocks, with what is known of their content; False where they do not fit.

        Args:
            sequence: without blocks; it has them, and `num_computed`, after.
            reserve: blocks that must stay free.
        """
        donor = self._donor(sequence)
        prefix = [*donor.block_table[: self._shared_with(sequence)]] if donor else self._cached_prefix(sequence)
        cached = [block for block in prefix if block is not None]
        fresh = self.blocks.blocks_for(sequence.num_tokens) - len(cached)
        if self.blocks.num_free_without(cached) < fresh + reserve:
            return False
        self.blocks.hold(cached)
        returning = [place for place, block in enumerate(prefix) if block is None]
        self._returning = [self._digests(sequence)[place] for place in returning]
        taken = iter(self.blocks.allocate(fresh))
        sequence.block_table = [next(taken) if block is None else block for block in prefix] + list(taken)
        self._bring_back(sequence, returning)
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

    def preemption_cost(self, sequence: Sequence) -> int:
        """Computed tokens that preempting a running sequence throws away, or that the copies of a parked one cost."""
        blocks = self.blocks.blocks_for(sequence.num_computed)
        if self._costs is None or not self._parks(sequence):
            return sequence.num_computed
        return self._costs.swap_cost_in_tokens(sequence.num_computed, blocks)

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
        if self.tier is not None:
            self.tier.check_integrity()

    def _digests(self, sequence: Sequence) -> list[bytes]:
        """Of the blocks that may come from the cache: full ones, but the last token is computed for its logits."""
        if not self.blocks.prefix_caching:
            return []
        return sequence.digests((sequence.num_tokens - 1) // self.blocks.block_size, self.blocks.block_size)

    def _cached_prefix(self, sequence: Sequence) -> list[int | None]:
        """The longest known prefix: blocks of the device, None where host memory holds one."""
        found: list[int | None] = []
        for digest in self._digests(sequence):
            block = self.blocks.block_of(digest)
            if block is None and (self.tier is None or self.tier.slot_of(digest) is None):
                break
            found.append(block)
        return found

    def _offload(self, block: int, digest: bytes) -> None:
        """Keep a cached block that the device is about to reuse."""
        slot = self.tier.store(digest, self._returning) if self.tier is not None else None
        if slot is not None:
            self._copies.append(BlockCopy(CopyKind.OUT, block, slot))

    def _bring_back(self, sequence: Sequence, places: list[int]) -> None:
        """Copy blocks of a prefix from host memory to the places of the table that wait for them."""
        returning, self._returning = self._returning, []
        if self.tier is None or not places:
            return
        for place, digest in zip(places, returning, strict=True):
            slot = self.tier.slot_of(digest)
            assert slot is not None, "a block that returns has left host memory"
            self._copies.append(BlockCopy(CopyKind.IN, slot, sequence.block_table[place]))
            self.blocks.publish(sequence.block_table[place], digest)
        self.tier.touch(returning)

    def _fill(self, sequence: Sequence, cached: int) -> None:
        """Note what the cached blocks at the front of a new table hold, and bring back what is parked."""
        sequence.num_computed = cached * self.blocks.block_size
        if sequence.cached_tokens is None:  # one that comes back finds what it has computed itself
            sequence.cached_tokens = sequence.num_computed
            self.totals.prefix_queried_tokens += sequence.num_tokens
            self.totals.prefix_hit_tokens += sequence.num_computed
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

    def _parks(self, sequence: Sequence) -> bool:
        blocks = self.blocks.blocks_for(sequence.num_computed)
        if self._costs is None or not 0 < blocks <= self._swap.num_free:
            return False
        return self._costs.swap_is_cheaper(sequence.num_computed, blocks)

    def _park(self, sequence: Sequence) -> Parked | None:
        """Copy a running sequence's KV to host memory; None where there is no room, or computing it is cheaper."""
        if not self._parks(sequence):
            return None
        blocks = self.blocks.blocks_for(sequence.num_computed)
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
