"""Which tokens a step computes: a policy over integers, without torch, clock, I/O or logging.

The step loop (`core`) calls `expire`, `schedule` and then `update`, once each a step. A step hands out a token budget:
first one token to every sequence that decodes, then to prefills under way, then to sequences admitted from the waiting
line, in the order of its policy.

Invariants that the property tests hold:

- A sequence gets all blocks for its known tokens when it is admitted, so only decoding grows a block table.
- When the pool is exhausted the last sequence in `running` is preempted: its blocks go, its tokens stay, its KV may be
  parked in host memory (`tables`), and it returns to the waiting line. The first one is never preempted and every
  request fits the pool alone, so the first always finishes: there is progress, whatever the policy.
- `running` is ordered, behind its first, by the policy's rank (`priority`, or the tier under `slo`), then by admission.
  So nobody is preempted for one that ranks below it. After a few preemptions a sequence ranks above all, and only the
  finite number of those before it delays it: everybody becomes the first some day.
- A request whose deadline is near takes slot and blocks of running ones of a lower tier (`urgency`), if no more than a
  step's work is thrown away. Each yields a bounded number of times; it is back before others yield; never the first.
- A preempted sequence comes back only when its blocks fit with a reserve for those that run, so that it is not thrown
  out again at once.
- A sequence whose next block is being computed by another one waits for it instead of computing it too. Prompts under
  way always go on, so it does not wait without end; if the other one goes, nothing is promised any more.
- A sequence whose turn it is and that does not fit may be passed by smaller ones, but only for `max_bypass_seconds`:
  after that it stays the next one, whatever the policy says of later turns, and free blocks are left to gather for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import inf

from paceline_server.engine.fairness import BLOCK_STEP_COST, INPUT_COST, OUTPUT_COST
from paceline_server.engine.intake import Intake
from paceline_server.engine.interface import TokenOutput
from paceline_server.engine.pacing import Pacer, Prefill, divide
from paceline_server.engine.queue import MAX_LOSSES, WaitingLine
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.tables import BlockTables
from paceline_server.engine.urgency import cheapest_victims

_SLOTS_BY_HEADROOM = 8  # of so many slots the last one is not for the tenant that holds most
_MAX_PASSED = 16  # sequences that a step tries and passes before it gives up, because they do not fit
_MAX_SHARING = 128  # the same, because what they need is about to come
_MAX_COMPARED = 32  # sequences that wait of which the shortest is looked for


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step.

    Attributes:
        max_batch_size: sequences that run together.
        max_tokens_in_batch: tokens that a step computes; at least max_batch_size.
        max_bypass_seconds: how long smaller sequences may pass one that does not fit.
    """

    max_batch_size: int
    max_tokens_in_batch: int
    max_bypass_seconds: float = 0.5


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`count` tokens of one sequence."""

    sequence: Sequence
    count: int


class Scheduler(Intake):
    """Owns the waiting line, the running sequences and their blocks.

    Args:
        tables: of the running sequences, which are none yet.
        waiting: an empty line; its class is the policy.
        pacer: sizes the prefill of a step; None leaves it the whole budget.
    """

    def __init__(
        self, limits: SchedulerLimits, tables: BlockTables, waiting: WaitingLine, pacer: Pacer | None = None
    ) -> None:
        assert limits.max_tokens_in_batch >= limits.max_batch_size
        super().__init__(waiting)
        self.limits = limits
        self.tables = tables
        self.blocks = tables.blocks
        self._pacer = pacer
        self._owed: Sequence | None = None  # did not fit, and has been passed for long enough
        self.running: list[Sequence] = []  # the first, then by rank and admission: the last is preempted first

    def abort(self, request_id: str) -> Sequence | None:
        """Drop a sequence, waiting or running, and take its blocks back; None where there is no such one."""
        self._expiring.remove(request_id)
        waiting = self.waiting.remove(request_id)
        if waiting is not None:
            self.tables.release(waiting)
            return waiting
        for index, sequence in enumerate(self.running):
            if sequence.request_id == request_id:
                del self.running[index]
                self.tables.release(sequence)
                self.waiting.note_end(sequence)
                return sequence
        return None

    def schedule(self, now: float) -> list[Scheduled]:
        """Decide the next step; empty only where nothing waits or runs, or all that waits does so for the disk.

        Args:
            now: the engine's clock in seconds; stamps the first scheduling of a sequence.
        """
        self._make_room(now)
        plan = self._decodes(now)
        budget = self._prefill_budget(plan)
        budget -= self._prefills(plan, budget, now)
        budget -= self._admit(plan, budget, now)
        _top_up(plan, budget)
        for item in plan:
            if item.sequence.first_scheduled is None:
                item.sequence.first_scheduled = now
        idle = not (self.running or self.waiting)
        assert plan or idle or self.tables.fetching, "nothing scheduled though there is work"
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
            self.tables.book(sequence, item.count)
            held = BLOCK_STEP_COST * len(sequence.block_table)
            self.waiting.charge(sequence, held if token_id is None else held + OUTPUT_COST)
            if token_id is None:
                continue
            reason = sequence.append(token_id)
            outputs.append(sequence.output((token_id,), reason))
            if reason is not None:
                finished.add(sequence.request_id)
                self._expiring.remove(sequence.request_id)
                self.tables.release(sequence)
                self.waiting.note_end(sequence)
        if finished:
            self.running = [sequence for sequence in self.running if sequence.request_id not in finished]
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences agree. For tests, after every step."""
        assert len(self.running) <= self.limits.max_batch_size
        ranks = [self.waiting.rank(sequence) for sequence in self.running[1:]]
        assert ranks == sorted(ranks), "somebody would be preempted for one that ranks below"
        self.tables.check_integrity(self.running, self.waiting)

    def _make_room(self, now: float) -> None:
        """Let running sequences make room for one of a higher tier that is nearly late, where it does not fit."""
        urgent = self.waiting.take_pressing(now)
        if urgent is None:
            return
        victims = self._victims_for(urgent)
        if not victims:
            self.waiting.put_back(urgent, now)
            return
        for victim in victims:
            victim.yields += 1
            self._preempt(victim, now)
        placed = self._place(urgent)
        assert placed, "sequences made room in vain"
        self._enter(urgent)

    def _victims_for(self, urgent: Sequence) -> list[Sequence]:
        """Who makes room; nobody where another answer to the prompt has begun, or its prefix is about to come."""
        if self.tables.runs_sibling(urgent) or self.tables.waits_for_prefix(urgent):
            return []
        limits = self.limits
        return cheapest_victims(urgent, self.running, self.tables, limits.max_batch_size, limits.max_tokens_in_batch)

    def _decodes(self, now: float) -> list[Scheduled]:
        safest_first = list(self.running)  # a copy: growing may preempt
        decoding = (sequence for sequence in safest_first if sequence.remaining == 1 and sequence.num_computed > 0)
        return [Scheduled(sequence, 1) for sequence in decoding if self._grow(sequence, now)]

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Make room for one more token; False where the sequence itself had to be preempted."""
        while not self.tables.grow(sequence):
            victim = self.running[-1]
            self._preempt(victim, now)
            if victim is sequence:
                return False
        return True

    def _prefill_budget(self, decodes: list[Scheduled]) -> int:
        budget = self.limits.max_tokens_in_batch - len(decodes)
        if self._pacer is None or not decodes or (len(decodes) == len(self.running) and not self.waiting):
            return budget
        position = next((one.num_computed for one in self.running if one.remaining > 1), 0)
        return self._pacer.prefill_tokens((item.sequence for item in decodes), position, budget)

    def _prefills(self, plan: list[Scheduled], budget: int, now: float) -> int:
        """Continue prefills under way in the order of `running`; returns the tokens given out.

        Those that the policy favours over all that wait go first and take what they can.
        """
        decoding = {item.sequence.request_id for item in plan}
        prefills = [sequence for sequence in self.running if sequence.request_id not in decoding]
        if not prefills:
            return 0
        waiting = self._shortest_newcomer()
        favoured = {one.request_id for one in prefills if waiting < inf and self.waiting.favours(one, now)}
        prefills.sort(key=lambda sequence: sequence.request_id not in favoured)
        parts = [Prefill(one.remaining, shares=one.request_id not in favoured) for one in prefills]
        counts = divide(budget, parts, waiting)
        plan += [Scheduled(one, count) for one, count in zip(prefills, counts, strict=True) if count > 0]
        return sum(counts)

    def _shortest_newcomer(self) -> float:
        """Tokens of the shortest of the first few that wait for a slot that is free; infinite where there is none."""
        if len(self.running) == self.limits.max_batch_size:
            return inf
        return min((sequence.remaining for sequence in islice(self.waiting, _MAX_COMPARED)), default=inf)

    def _admit(self, plan: list[Scheduled], budget: int, now: float) -> int:
        """Take sequences from the waiting line while slots, tokens and blocks last; returns the tokens given out."""
        passed: list[Sequence] = []
        given = sharing = 0
        while given < budget and len(self.running) < self.limits.max_batch_size:
            free = self.limits.max_batch_size - len(self.running)
            scarce = free <= self.limits.max_batch_size // _SLOTS_BY_HEADROOM
            sequence = self.waiting.take(now, scarce=scarce, owed=self._owed)
            if sequence is None:
                break
            if self.tables.waits_for_prefix(sequence):
                passed.append(sequence)
                sharing += 1
                if sharing == _MAX_SHARING:
                    break
            elif self._place(sequence):
                self._enter(sequence)
                plan.append(Scheduled(sequence, min(sequence.remaining, budget - given)))
                given += plan[-1].count
            else:
                passed.append(sequence)
                if not self._may_be_passed(sequence, now) or len(passed) - sharing == _MAX_PASSED:
                    break
        for sequence in passed:
            self.waiting.put_back(sequence, now)
        return given

    def _enter(self, sequence: Sequence) -> None:
        """Add it to those that run: behind the first, and before those that the policy ranks below it."""
        rank, place = self.waiting.rank(sequence), len(self.running)
        while place > 1 and self.waiting.rank(self.running[place - 1]) > rank:
            place -= 1
        self.running.insert(place, sequence)

    def _may_be_passed(self, sequence: Sequence, now: float) -> bool:
        if sequence.preemptions >= MAX_LOSSES:
            return False
        if sequence.blocked_since is None:
            sequence.blocked_since = now
        if now - sequence.blocked_since < self.limits.max_bypass_seconds:
            return True
        self._owed = sequence
        return False

    def _place(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks; False where they do not fit."""
        reserve = len(self.running)  # a block each, for the next tokens of those that run
        if not self.tables.place(sequence, reserve):
            return False
        sequence.blocked_since = None
        if self._owed is sequence:
            self._owed = None
        if not sequence.preemptions:  # computing anew what was thrown out is not the tenant's doing
            self.waiting.charge(sequence, INPUT_COST * sequence.remaining)
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self.running.remove(sequence)
        self.tables.suspend(sequence)
        sequence.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.put_back(sequence, now)


def _top_up(plan: list[Scheduled], budget: int) -> None:
    """Give prompts under way what was left for newcomers that could not enter."""
    for index, item in enumerate(plan):
        more = min(item.sequence.remaining - item.count, budget)
        if more > 0:
            plan[index] = Scheduled(item.sequence, item.count + more)
            budget -= more
