"""Blocks that the device has evicted: which of them host memory and disk still hold, by digest.

`tables` tells it of every evicted block and asks it for every prefix; `core` carries its file jobs to a `BlockFiles`
and brings back what came of them, so that no disk is waited for in the step loop. A digest is chained over all tokens
before the block, the cache salt and the model's identity, so that what is found is what is wanted.

A block enters host memory when the device evicts it. Once host memory is half full, its entries are written to disk,
the least recently used first and whether or not the engine computes, so that a slot that is needed can be given up at
once. A prefix that is on disk is read back into host memory first; its sequence waits for that while more of it comes,
and no block keeps it for long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Protocol

from paceline_server.engine.sequence import DiskWait

_MAX_FILE_JOBS = 64
"""Jobs under way together: each pins a slot."""

_MAX_TRIED = 2 * _MAX_FILE_JOBS
"""Entries that are looked at for one that may go: where the disk is too slow for all, blocks are not kept."""

_PATIENCE_SECONDS = 1.0
"""What brings no further block in that time is not waited for: by then most prompts are computed."""


class FileAction(Enum):
    """What is done with a block's file."""

    WRITE = "write"
    READ = "read"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class FileJob:
    """One action; `slot` is the host memory it takes from or fills, None for a deletion."""

    action: FileAction
    digest: bytes
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class FileResult:
    """What came of a job that writes or reads. A file that is missing, damaged or of another model is not `ok`."""

    job: FileJob
    ok: bool


class BlockFiles(Protocol):
    """Blocks on disk; works beside the step loop."""

    def stored(self) -> list[bytes]:
        """Digests of the blocks that were there at the start, least recently used first."""
        ...

    def begin(self, job: FileJob) -> None:
        """Start a job; its slot is left alone until its result is there."""
        ...

    def results(self) -> list[FileResult]:
        """Results since the last call, without waiting."""
        ...


@dataclass(slots=True)
class OffloadTotals:
    """Blocks since the start: stored in host memory, returned to the device, written to disk, read; failed reads."""

    stored: int = 0
    returned: int = 0
    written: int = 0
    read: int = 0
    failed_reads: int = 0


class OffloadTier:
    """The index of host memory and disk. No content passes through it.

    Args:
        slots: of host memory that belong to it.
        disk_blocks: files at most; 0 is no disk.
        stored: digests that are on disk already, least recently used first.
    """

    def __init__(self, slots: range, disk_blocks: int = 0, stored: Iterable[bytes] = ()) -> None:
        self.totals = OffloadTotals()
        self._num_slots = len(slots)
        self._free = list(reversed(slots))
        self._host: OrderedDict[bytes, int] = OrderedDict()  # slots by digest, least recently used first
        self._disk: OrderedDict[bytes, None] = OrderedDict.fromkeys(stored)
        self._disk_blocks = disk_blocks
        self._dirty: OrderedDict[bytes, None] = OrderedDict()  # in host memory, and to be written before they go
        self._writing: dict[bytes, int] = {}
        self._reading: dict[bytes, tuple[int, float]] = {}  # slot, and when it began
        self._jobs: list[FileJob] = []
        self._now = 0.0
        self._bound_disk()

    @property
    def fetching(self) -> bool:
        """Whether a read is under way that somebody may wait for."""
        return any(self._is_due(begun) for _, begun in self._reading.values())

    def slot_of(self, digest: bytes) -> int | None:
        """Where host memory holds a block now."""
        return self._host.get(digest)

    def store(self, digest: bytes, keep: Sequence[bytes] = ()) -> int | None:
        """A slot for a block that the device evicts, whose copy the caller decides now; None where there is none.

        Args:
            keep: digests whose slots must stay as they are.
        """
        if digest in self._host:
            self._use(digest)
            return None
        slot = None if digest in self._reading else self._take_slot(keep)
        if slot is not None:
            self._host[digest] = slot
            self.totals.stored += 1
            if self._disk_blocks and digest not in self._disk:
                self._dirty[digest] = None
        return slot

    def touch(self, digests: Sequence[bytes]) -> None:
        """These blocks are copied back to the device: they were useful."""
        for digest in reversed(digests):  # the tail of a prefix goes before what it depends on
            self._use(digest)
        self.totals.returned += len(digests)

    def is_patient(self, wait: DiskWait, found: int) -> bool:
        """Whether a sequence of whose prefix `found` blocks are there may wait for more.

        Prefixes that push each other out of host memory, or themselves, would be read without end.
        """
        if wait.since is None or found > wait.found:
            wait.found, wait.since = found, self._now
        return self._is_due(wait.since)

    def fetch(self, digests: Sequence[bytes], keep: Sequence[bytes]) -> bool:
        """Start to read the first of these blocks from disk, as far as they are there; whether that is waited for.

        Args:
            keep: digests whose slots must stay as they are: the whole prefix.
        """
        for digest in digests:
            if digest in self._reading or digest in self._host:
                continue
            if digest not in self._disk or len(self._reading) + len(self._writing) >= _MAX_FILE_JOBS:
                break
            slot = self._take_slot(keep)
            if slot is None:
                break
            self._reading[digest] = slot, self._now
            self._disk.move_to_end(digest)
            self._jobs.append(FileJob(FileAction.READ, digest, slot))
        reading = self._reading.get(digests[0])
        return reading is not None and self._is_due(reading[1])

    def take_jobs(self) -> list[FileJob]:
        """Jobs to begin once the copies of the step that was just decided are done."""
        self._write_behind()
        jobs, self._jobs = self._jobs, []
        return jobs

    def note(self, results: Iterable[FileResult], now: float) -> None:
        """Take what came of jobs; `now` is the engine's clock in seconds."""
        self._now = now
        for result in results:
            if result.job.action is FileAction.WRITE:
                self._note_write(result)
            else:
                self._note_read(result)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free, held, or being filled, once. For tests."""
        used = [*self._free, *self._host.values(), *(slot for slot, _ in self._reading.values())]
        assert len(used) == len(set(used)) == self._num_slots, "an offload slot is leaked or held twice"
        assert self._writing.items() <= self._host.items(), "a slot was given away while it is written"
        assert self._dirty.keys() <= self._host.keys() - self._writing.keys(), "what is to be written is gone"
        assert len(self._disk) <= self._disk_blocks, "more files than allowed"

    def _take_slot(self, keep: Sequence[bytes]) -> int | None:
        if self._free:
            return self._free.pop()
        kept = set(keep)
        for digest in islice(self._host, _MAX_TRIED):
            if digest not in self._writing and digest not in self._dirty and digest not in kept:
                return self._host.pop(digest)
        return None

    def _use(self, digest: bytes) -> None:
        """Of what is to be written, what goes first is written first: the two orders must stay one."""
        self._host.move_to_end(digest)
        if digest in self._dirty:
            self._dirty.move_to_end(digest)

    def _write_behind(self) -> None:
        """Begin as many writes as may be under way: those that wait for another eviction may wait for good."""
        if 2 * len(self._host) <= self._num_slots:
            return
        while self._dirty and len(self._writing) < _MAX_FILE_JOBS // 2:
            digest, _ = self._dirty.popitem(last=False)
            self._writing[digest] = self._host[digest]
            self._jobs.append(FileJob(FileAction.WRITE, digest, self._host[digest]))

    def _note_write(self, result: FileResult) -> None:
        del self._writing[result.job.digest]
        if result.ok:
            self.totals.written += 1
            self._disk[result.job.digest] = None
            self._bound_disk()

    def _note_read(self, result: FileResult) -> None:
        slot, _ = self._reading.pop(result.job.digest)
        if result.ok:
            self.totals.read += 1
            self._host[result.job.digest] = slot
        else:
            self.totals.failed_reads += 1
            self._free.append(slot)
            self._disk.pop(result.job.digest, None)
            self._jobs.append(FileJob(FileAction.DELETE, result.job.digest))

    def _bound_disk(self) -> None:
        while len(self._disk) > self._disk_blocks:
            digest, _ = self._disk.popitem(last=False)
            self._jobs.append(FileJob(FileAction.DELETE, digest))

    def _is_due(self, begun: float) -> bool:
        return self._now - begun < _PATIENCE_SECONDS


class FileTraffic:
    """Carries jobs from a tier to its files and results back, once a step each, also of one in which nothing is due.

    Called by `core`.
    """

    def __init__(self, tier: OffloadTier, files: BlockFiles) -> None:
        self._tier = tier
        self._files = files

    def receive(self, now: float) -> None:
        """Before a step is decided."""
        self._tier.note(self._files.results(), now)

    def send(self) -> None:
        """When the copies of the step are done, if it has any."""
        for job in self._tier.take_jobs():
            self._files.begin(job)
