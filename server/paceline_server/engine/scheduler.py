"""Which tokens a step computes: a policy over integers, without torch, clock, I/O or logging.

The step loop (`core`) calls `schedule` and then `update`, once each a step. A step hands out a token budget: first one
token to every sequence that decodes, then to prefills under way, then to sequences admitted from the waiting line.

Invariants that the property tests hold:

- A sequence gets all blocks for its known tokens when it is admitted, so only decoding grows a block table.
- When the pool is exhausted the most recently admitted sequence is preempted (its blocks go, its tokens stay, it
  returns to the head of the line). The oldest one is never preempted and every request fits the pool alone, so the
  oldest always finishes: there is progress.
- A preempted sequence comes back only when its blocks fit with a reserve for those that run, so that it is not thrown
  out again at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.engine.blocks import BlockManager
from paceline_server.engine.interface import FinishReason, TokenOutput
from paceline_server.engine.queue import FcfsQueue
from paceline_server.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step.

    Attributes:
        max_batch_size: sequences that run together.
        max_tokens_in_batch: tokens that a step computes; at least max_batch_size.
    """

    max_batch_size: int
    max_tokens_in_batch: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`count` tokens of one sequence."""

    sequence: Sequence
    count: int


@dataclass(slots=True)
class SchedulerTotals:
    """Counts since the start."""

    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """Owns the waiting line, the running sequences and their blocks."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        assert limits.max_tokens_in_batch >= limits.max_batch_size
        self.limits = limits
        self.blocks = blocks
        self.waiting = FcfsQueue()
        self.running: list[Sequence] = []  # in order of admission: the last one is preempted first
        self.totals = SchedulerTotals()

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the waiting line. The caller has checked that it fits the pool alone."""
        self.waiting.push(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a sequence, waiting or running, and take its blocks back; False where there is no such one."""
        if self.waiting.remove(request_id) is not None:
            return True
        for index, sequence in enumerate(self.running):
            if sequence.request_id == request_id:
                del self.running[index]
                self._release(sequence)
                return True
        return False

    def schedule(self, now: float) -> list[Scheduled]:
        """Decide the next step; empty only where nothing waits or runs.

        Args:
            now: the engine's clock in seconds; stamps the first scheduling of a sequence.
        """
        plan = self._decodes()
        budget = self.limits.max_tokens_in_batch - len(plan)
        budget -= self._prefills(plan, budget)
        self._admit(plan, budget)
        for item in plan:
            if item.sequence.first_scheduled is None:
                item.sequence.first_scheduled = now
        assert plan or not (self.running or self.waiting), "nothing scheduled though there is work"
        return plan

    def update(self, plan: list[Scheduled], sampled: list[int | None]) -> list[TokenOutput]:
        """Book a step that has run: tokens are appended, full blocks published, finished sequences leave.

        Args:
            plan: what `schedule` returned.
            sampled: the runner's answer, one entry an item of the plan.
        """
        outputs: list[TokenOutput] = []
        finished: set[str] = set()
        for item, token_id in zip(plan, sampled, strict=True):
            sequence = item.sequence
            self._book(sequence, item.count)
            if token_id is None:
                continue
            reason = sequence.append(token_id)
            outputs.append(_output(sequence, token_id, reason))
            if reason is not None:
                finished.add(sequence.request_id)
                self._release(sequence)
        if finished:
            self.running = [sequence for sequence in self.running if sequence.request_id not in finished]
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences agree. For tests, after every step."""
        self.blocks.check_integrity(sequence.block_table for sequence in self.running)
        assert len(self.running) <= self.limits.max_batch_size
        for sequence in self.running:
            assert 0 <= sequence.num_computed < sequence.num_tokens, "a running sequence has nothing to compute"
            assert len(sequence.block_table) >= self.blocks.blocks_for(sequence.num_computed), "KV without a block"
        for sequence in self.waiting:
            assert not sequence.block_table, "a waiting sequence holds blocks"
            assert sequence.num_computed == 0, "a waiting sequence has KV"

    def _decodes(self) -> list[Scheduled]:
        oldest_first = list(self.running)  # a copy: growing may preempt
        decoding = (sequence for sequence in oldest_first if sequence.remaining == 1 and sequence.num_computed > 0)
        return [Scheduled(sequence, 1) for sequence in decoding if self._grow(sequence)]

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more token; False where the sequence itself had to be preempted."""
        needed = self.blocks.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        while self.blocks.num_free < needed:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += self.blocks.allocate(needed)
        return True

    def _prefills(self, plan: list[Scheduled], budget: int) -> int:
        """Continue prefills under way, oldest first; returns the tokens given out.

        While somebody waits for admission, each takes at most half of what is left, so that a long prompt does not
        keep short ones from entering.
        """
        given = 0
        decoding = {item.sequence.request_id for item in plan}
        crowded = len(self.waiting) > 0 and len(self.running) < self.limits.max_batch_size
        for sequence in self.running:
            if sequence.request_id in decoding:
                continue
            left = budget - given
            count = min(sequence.remaining, -(-left // 2) if crowded else left)
            if count > 0:
                plan.append(Scheduled(sequence, count))
                given += count
        return given

    def _admit(self, plan: list[Scheduled], budget: int) -> None:
        """Take sequences from the waiting line while slots, tokens and blocks last."""
        while budget > 0 and len(self.running) < self.limits.max_batch_size:
            sequence = self.waiting.head()
            if sequence is None or not self._place(sequence):
                return
            self.waiting.remove(sequence.request_id)
            self.running.append(sequence)
            count = min(sequence.remaining, budget)
            plan.append(Scheduled(sequence, count))
            budget -= count

    def _place(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks, cached ones where there are; False where they do not fit."""
        prefix = self._cached_prefix(sequence)
        fresh = self.blocks.blocks_for(sequence.num_tokens) - len(prefix)
        reserve = len(self.running)  # a block each, for the next tokens of those that run
        if self.blocks.num_free_without(prefix) < fresh + reserve:
            return False
        self.blocks.hold(prefix)
        sequence.block_table = prefix + self.blocks.allocate(fresh)
        sequence.num_computed = len(prefix) * self.blocks.block_size
        self.totals.prefix_queried_tokens += sequence.num_tokens
        self.totals.prefix_hit_tokens += sequence.num_computed
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
        return True

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        if not self.blocks.prefix_caching:
            return []
        full = (sequence.num_tokens - 1) // self.blocks.block_size  # the last token is computed for its logits
        return self.blocks.find_prefix(sequence.digests(full, self.blocks.block_size))

    def _book(self, sequence: Sequence, count: int) -> None:
        size = self.blocks.block_size
        full_before = sequence.num_computed // size
        sequence.num_computed += count
        full = sequence.num_computed // size
        if self.blocks.prefix_caching and full > full_before:
            digests = sequence.digests(full, size)
            for index in range(full_before, full):
                self.blocks.publish(sequence.block_table[index], digests[index])

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.push_first(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []


def _output(sequence: Sequence, token_id: int, reason: FinishReason | None) -> TokenOutput:
    started = sequence.arrival if sequence.first_scheduled is None else sequence.first_scheduled
    return TokenOutput(
        request_id=sequence.request_id,
        token_ids=(token_id,),
        finish=reason,
        cached_tokens=sequence.cached_tokens or 0,
        queue_seconds=started - sequence.arrival,
    )
