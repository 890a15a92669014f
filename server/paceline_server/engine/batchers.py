"""Which scheduler the step loop runs: by steps, or by whole requests. `core` and `admission` call it.

All batchers share the waiting line, the runner and the step loop; they differ in who computes in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from paceline_server.engine.blocks import BlockManager
from paceline_server.engine.intake import SchedulerTotals
from paceline_server.engine.interface import TokenOutput
from paceline_server.engine.pacing import Pacer
from paceline_server.engine.queue import WaitingLine
from paceline_server.engine.request_level import RequestLevelScheduler
from paceline_server.engine.scheduler import Scheduled, Scheduler, SchedulerLimits
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.tables import BlockTables
from paceline_server.engine.window import DelayWindow


class Batcher(StrEnum):
    """When sequences join and leave a batch: at every step, or together (see `request_level`)."""

    CONTINUOUS = "continuous"
    DYNAMIC = "dynamic"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class Batching:
    """How batches are made.

    Attributes:
        packed: prompts are computed as they are; else padded to the longest of their batch (static only).
        max_delay: seconds that an idle engine may wait for company.
    """

    batcher: Batcher = Batcher.CONTINUOUS
    packed: bool = True
    max_delay: float = 0.0

    @property
    def by_request(self) -> bool:
        """Whether a batch is computed to its end before the next one begins."""
        return self.batcher is not Batcher.CONTINUOUS


class StepScheduler(Protocol):
    """What the step loop asks of a scheduler: `expire`, `schedule` and `update`, once each a step."""

    limits: SchedulerLimits
    tables: BlockTables
    blocks: BlockManager
    waiting: WaitingLine
    running: list[Sequence]
    totals: SchedulerTotals

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the waiting line."""
        ...

    def abort(self, request_id: str) -> Sequence | None:
        """Drop a sequence, waiting or running; None where there is no such one."""
        ...

    def expire(self, now: float) -> list[TokenOutput]:
        """Drop all sequences whose timeout is over; returns the last output of each."""
        ...

    def schedule(self, now: float) -> list[Scheduled]:
        """Decide the next step; empty only where nothing waits or runs, or all that waits does so for the disk."""
        ...

    def update(self, plan: list[Scheduled], sampled: list[int | None]) -> list[TokenOutput]:
        """Book a step that has run."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences agree. For tests, after every step."""
        ...


def make_scheduler(
    batching: Batching, limits: SchedulerLimits, tables: BlockTables, waiting: WaitingLine, pacer: Pacer
) -> StepScheduler:
    """The scheduler of a batcher, idle."""
    if not batching.by_request:
        return Scheduler(limits, tables, waiting, pacer)
    held = batching.batcher is Batcher.STATIC
    return RequestLevelScheduler(limits, tables, waiting, packed=batching.packed, held=held)


def delay_window(batching: Batching, places: int) -> DelayWindow:
    """How long an idle engine waits for company; a static batch always waits the whole time, unless it is full."""
    return DelayWindow(batching.max_delay, places, adaptive=batching.batcher is not Batcher.STATIC)
