"""Scheduling by whole requests: the baseline that continuous batching is measured against.

A batch is taken off the waiting line, computed to the end of its last member, and only then comes the next one. The
step loop (`core`) drives it like `scheduler.Scheduler`. Two kinds (`batchers.Batcher`):

- dynamic: a member that has its last token is answered and leaves; its slot stays empty until the batch is over.
- static: a member that has its last token keeps its slot and goes on computing, and its end is told with the batch's,
  as when a model's `generate` is called for all of them.

As in servers of that kind, memory for the longest possible answer is set aside before a batch starts. So nothing is
ever preempted, and as no two batches overlap, no prefix is shared either.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from paceline_server.engine.dynamic import pop_batch
from paceline_server.engine.fairness import INPUT_COST, OUTPUT_COST
from paceline_server.engine.intake import Intake
from paceline_server.engine.interface import GenerationRequest, TokenOutput
from paceline_server.engine.queue import WaitingLine
from paceline_server.engine.scheduler import Scheduled, SchedulerLimits
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.tables import BlockTables


class RequestLevelScheduler(Intake):
    """Owns the waiting line, the batch and its blocks. See `batchers.StepScheduler`.

    Args:
        tables: of the batch, which is empty; they share no prefixes.
        waiting: an empty line; its class is the policy.
        packed: compute prompts as they are; else each is padded to the longest of its batch.
        held: members stay until the batch ends (static).
    """

    def __init__(
        self, limits: SchedulerLimits, tables: BlockTables, waiting: WaitingLine, *, packed: bool, held: bool
    ) -> None:
        super().__init__(waiting)
        self.limits = limits
        self.tables = tables
        self.blocks = tables.blocks
        self.running: list[Sequence] = []  # the batch, held members included
        self._packed = packed
        self._held = held
        self._ends: dict[str, TokenOutput] = {}  # last outputs of held members, told when the batch ends
        self._scratch: list[int] = []  # blocks that padding is written to

    def abort(self, request_id: str) -> Sequence | None:
        """Drop a sequence, waiting or in the batch; None where there is no such one."""
        self._expiring.remove(request_id)
        waiting = self.waiting.remove(request_id)
        if waiting is not None:
            return waiting
        sequence = next((one for one in self.running if one.request_id == request_id), None)
        if sequence is not None:
            self._ends.pop(request_id, None)
            self._leave(sequence)
        return sequence

    def expire(self, now: float) -> list[TokenOutput]:
        """Drop all sequences whose timeout is over; returns their last outputs, and those of a batch that this ends."""
        return super().expire(now) + self._end_of_batch()

    def schedule(self, now: float) -> list[Scheduled]:
        """The whole prompts of a new batch, or one token for each member of the one under way."""
        if self.running:
            return [Scheduled(sequence, 1) for sequence in self.running]
        self.running = pop_batch(self.waiting, self._fits, now)
        plan = [Scheduled(sequence, sequence.num_tokens) for sequence in self.running]
        for sequence in self.running:
            sequence.block_table = self.blocks.allocate(self._reserve(sequence))
            sequence.first_scheduled = now
            sequence.cached_tokens = 0
            self.waiting.charge(sequence, INPUT_COST * sequence.num_tokens)
        return plan if self._packed else plan + self._padding(now)

    def update(self, plan: list[Scheduled], sampled: list[int | None]) -> list[TokenOutput]:
        """Book a step that has run; see `Scheduler.update`. What held members and padding computed is dropped."""
        outputs: list[TokenOutput] = []
        live = {one.request_id for one in self._live}
        self.totals.held_tokens += sum(item.sequence.request_id in self._ends for item in plan)
        for item, token_id in zip(plan, sampled, strict=True):
            sequence = item.sequence
            if sequence.request_id not in live:
                continue
            assert token_id is not None, "a member of a batch has a token with every step"
            sequence.num_computed += item.count
            self.waiting.charge(sequence, OUTPUT_COST)
            outputs += self._append(sequence, token_id)
        return outputs + self._end_of_batch()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences agree. For tests, after every step."""
        tables = [sequence.block_table for sequence in self.running]
        self.blocks.check_integrity([*tables, self._scratch] if self._scratch else tables)
        assert self.running or not (self._ends or self._scratch), "something is left of a batch that is over"
        for sequence in self.waiting:
            assert not sequence.block_table, "a waiting sequence holds blocks"

    @property
    def _live(self) -> list[Sequence]:
        """Members that still generate."""
        return [sequence for sequence in self.running if sequence.request_id not in self._ends]

    def _fits(self, batch: Several[Sequence]) -> bool:
        lengths = [sequence.num_tokens for sequence in batch]
        tokens = sum(lengths) if self._packed else len(lengths) * max(lengths)
        padding = 0 if self._packed else self.blocks.blocks_for(max(lengths) - min(lengths))
        return (
            len(batch) <= self.limits.max_batch_size
            and tokens <= self.limits.max_tokens_in_batch
            and sum(map(self._reserve, batch)) + padding <= self.blocks.num_free
        )

    def _reserve(self, sequence: Sequence) -> int:
        """Blocks for a sequence that becomes as long as it may."""
        return self.blocks.blocks_for(len(sequence.request.prompt_token_ids) + sequence.max_tokens)

    def _padding(self, now: float) -> list[Scheduled]:
        """Tokens of no meaning behind each shorter prompt, as sequences of their own; nobody ever reads them."""
        longest = max(sequence.num_tokens for sequence in self.running)
        missing = [longest - one.num_tokens for one in self.running if one.num_tokens < longest]
        self._scratch = self.blocks.allocate(self.blocks.blocks_for(max(missing, default=0)))
        self.totals.padded_tokens += sum(missing)
        return [Scheduled(self._filler(number, count, now), count) for number, count in enumerate(missing)]

    def _filler(self, number: int, count: int, now: float) -> Sequence:
        # One token more than is computed: a slice that does not reach the end is not sampled.
        request = GenerationRequest(f"padding {number}", (0,) * (count + 1), 1)
        return Sequence(request, now, max_tokens=1, block_table=self._scratch)

    def _append(self, sequence: Sequence, token_id: int) -> list[TokenOutput]:
        """Add a token; returns what may be told of it now."""
        reason = sequence.append(token_id)
        output = sequence.output((token_id,), reason)
        if reason is None:
            return [output]
        self._expiring.remove(sequence.request_id)
        if self._held:
            self._ends[sequence.request_id] = output
            return []
        self._leave(sequence)
        return [output]

    def _end_of_batch(self) -> list[TokenOutput]:
        """When nobody generates any more: free what is held, and tell the ends."""
        if self._live:
            return []
        for sequence in list(self.running):
            self._leave(sequence)
        self.blocks.release(self._scratch)
        self._scratch = []
        ends, self._ends = list(self._ends.values()), {}
        return ends

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.tables.release(sequence)
        self.waiting.note_end(sequence)
