"""The step loop: schedule ▸ execute ▸ update.

`loop` drives it in the engine process; tests and benchmarks drive it directly. Single-threaded: requests are added
and aborted between steps, so nothing needs a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter

from paceline_server.config import SchedulingConfig
from paceline_server.engine.admission import Admission, Refusal
from paceline_server.engine.batch import Runner, StepBatch
from paceline_server.engine.batchers import Batching, delay_window, make_scheduler
from paceline_server.engine.blocks import root_hash
from paceline_server.engine.capacity import Capacity
from paceline_server.engine.forecast import Forecast
from paceline_server.engine.hot_prefixes import HotPrefixes
from paceline_server.engine.interface import GenerationRequest, HotPrefix, ModelInfo, PrefixList, Tier, TokenOutput
from paceline_server.engine.memory import make_tables
from paceline_server.engine.offload import BlockFiles, FileTraffic
from paceline_server.engine.pacing import Pacer
from paceline_server.engine.policies import tpot_targets, ttft_targets, waiting_line
from paceline_server.engine.samples import SampleGroups, num_waiting, split
from paceline_server.engine.scheduler import Scheduled, SchedulerLimits
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.status import EngineStats
from paceline_server.engine.steptime import StepShape, StepTimeModel

_DISK_POLL_SECONDS = 0.002


class EngineCore:
    """A scheduler and a runner, stepped together.

    Args:
        runner: the model.
        info: what is loaded; gives the pool's size and the end-of-sequence tokens.
        limits: bounds of a step.
        scheduling: who goes first.
        prefix_caching: keep freed blocks for prompts that share them; batches by request never do.
        batching: when sequences join and leave a batch.
        files: blocks on disk, where info has room for some.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        runner: Runner,
        info: ModelInfo,
        limits: SchedulerLimits,
        scheduling: SchedulingConfig | None = None,
        *,
        prefix_caching: bool = True,
        batching: Batching | None = None,
        files: BlockFiles | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.info = info
        scheduling = scheduling or SchedulingConfig()
        self.step_time = StepTimeModel()
        pacer = Pacer(self.step_time, tpot_targets(scheduling.tiers))
        batching = batching or Batching()
        caching = prefix_caching and not batching.by_request
        stored = files.stored() if files is not None else ()
        tables = make_tables(info, self.step_time, stored, prefix_caching=caching)
        self._traffic = FileTraffic(tables.tier, files) if tables.tier is not None and files is not None else None
        self._retry_at: float | None = None
        line = waiting_line(scheduling, tables.cached_tokens)
        self.scheduler = make_scheduler(batching, limits, tables, line, pacer)
        self._window = delay_window(batching, limits.max_batch_size)
        self._by_request = batching.by_request
        self._capacity = Capacity(info, limits.max_tokens_in_batch if batching.by_request else None)
        self.admission = Admission(
            self.scheduler, pacer, Forecast(self.step_time), ttft_targets(scheduling.tiers), scheduling.admission
        )
        self._runner = runner
        self._eos = frozenset(info.eos_token_ids)
        self._samples = SampleGroups()
        self._hot = HotPrefixes(info.block_size)
        self._clock = clock
        self._steps = 0
        self._computed_tokens = 0
        self._last_plan: list[Scheduled] = []
        self._stage_seconds = {"schedule": 0.0, "execute": 0.0, "update": 0.0}

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def due_in(self) -> float | None:
        """Seconds until `step` computes something; None where nothing waits or runs."""
        return self._due_in(self._clock())

    def submit(self, request: GenerationRequest, arrival: float | None = None, *, judge: bool = True) -> Refusal | None:
        """Queue a request.

        Args:
            arrival: when it came, if that was before now, on the core's clock.
            judge: ask admission whether it would be in time. The forecast knows batches by step only: where they are
                by request, everybody may wait, and a timeout ends those who wait too long.

        Returns:
            Why it is not taken, or None.
        """
        now = self._clock()
        reason = self._capacity.why_never(request)
        if reason is not None:
            return Refusal(reason)
        samples = self._sequences(request, now if arrival is None else arrival)
        refusal = self.admission.refusal(samples[0], now) if judge and not self._by_request else None
        if refusal is None:
            self._note_prefix(samples[0])
            self.scheduler.add(samples[0])
            self._window.note(samples[0].arrival)
            if len(samples) > 1:
                self._samples.open(request.request_id, samples)
        return refusal

    def submit_prefix(self, request_id: str, prefix: HotPrefix) -> bool:
        """Queue the computation of another replica's prefix, for its blocks alone; False where it cannot be."""
        # Its root may be of deterministic requests, which only find what is computed like them; others may find it too.
        exact = self.info.deterministic
        request = GenerationRequest(request_id, (*prefix.token_ids, 0), 1, tier=Tier.BATCH, deterministic=exact)
        if self._capacity.why_never(request) is not None or not self.scheduler.blocks.prefix_caching:
            return False
        if not all(0 <= token < self.info.vocab_size for token in prefix.token_ids):
            return False
        self.scheduler.add(self._sequences(request, self._clock(), prefix.root)[0])
        return True

    def hot_prefixes(self, request_id: str, limit: int) -> PrefixList:
        """The prefixes that requests have shared most, as many as half the pool holds."""
        found = self._hot.hottest(limit, self.info.kv_capacity_tokens // 2)
        return PrefixList(request_id, self.info.kv_identity, tuple(found))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one answer of it; unknown ones (already finished) are no error."""
        leaving, entering = self._samples.leave(request_id, index)
        for one in entering:
            self.scheduler.add(one)
        for name in leaving:
            self.scheduler.abort(name)
            self.admission.forget(name)

    def step(self) -> list[TokenOutput]:
        """Run one step over whatever is due; returns the new tokens, and the ends of those that ran out of time."""
        begin = self._clock()
        if self._traffic is not None:
            self._traffic.receive(begin)
        expired = self._expire(begin)
        due = self._due_in(begin)
        if due is None or due > 0.0:
            self._begin_file_jobs()
            return self._name(expired)
        plan = self.scheduler.schedule(begin)
        if not plan:
            self._wait_for_disk(begin)
            return self._name(expired)
        self._retry_at = None
        shape = StepShape.of((item.sequence.num_computed, item.count) for item in plan)
        slices = [item.sequence.slice(item.count) for item in plan]
        batch = StepBatch(slices, self.scheduler.tables.take_copies())
        scheduled = self._clock()
        sampled = list(self._runner.execute(batch))
        executed = self._clock()
        self._begin_file_jobs()
        outputs = self.scheduler.update(plan, sampled)
        self.admission.learn(plan, outputs, executed)
        self._account(plan, begin, scheduled, executed)
        self.step_time.observe(shape, self._clock() - begin)
        return self._name(expired + outputs)

    def stats(self) -> EngineStats:
        """Gauges of this moment and totals since the start."""
        scheduler, tables, tier = self.scheduler, self.scheduler.tables.totals, self.scheduler.tables.tier
        oldest = scheduler.waiting.oldest_arrival
        return EngineStats(
            waiting=self._num_waiting(),
            running=len(scheduler.running),
            waiting_tokens=scheduler.waiting.num_tokens,
            kv_usage=1.0 - scheduler.blocks.num_free / scheduler.blocks.num_blocks,
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            preemptions=scheduler.totals.preemptions,
            expirations=scheduler.totals.expirations,
            prefix_queried_tokens=tables.prefix_queried_tokens,
            prefix_hit_tokens=tables.prefix_hit_tokens,
            swapped_out_blocks=tables.swapped_out_blocks,
            swapped_in_blocks=tables.swapped_in_blocks,
            offloaded_blocks=asdict(tier.totals) if tier is not None else {},
            batch_sequences=len(self._last_plan),
            batch_tokens=sum(item.count for item in self._last_plan),
            oldest_waiting_seconds=0.0 if oldest is None else self._clock() - oldest,
            predicted_ttft_seconds={} if self._by_request else self.admission.outlook(self._clock()),
            stage_seconds=dict(self._stage_seconds),
            step_costs=self._step_costs(),
        )

    def _num_waiting(self) -> int:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        return num_waiting(waiting, running) if len(self._samples) else len(waiting)

    def _step_costs(self) -> dict[str, float]:
        if not self.step_time.known:
            return {}
        return dict(zip(("step", "token", "pair"), self.step_time.coefficients, strict=True))

    def _sequences(self, request: GenerationRequest, arrival: float, root: bytes = b"") -> list[Sequence]:
        """The samples that a request asks for."""
        # What others have computed may differ in its last bits: those that must not share among themselves.
        keys = (request.cache_salt, "deterministic") if request.deterministic else (request.cache_salt,)
        root = root or root_hash(self.info.kv_identity, *keys)
        return [
            Sequence(
                sample,
                arrival=arrival,
                max_tokens=self._capacity.output_tokens(request),
                eos_token_ids=self._eos,
                group=request.request_id if request.n > 1 else None,
                root=root,
            )
            for sample in split(request)
        ]

    def _note_prefix(self, sequence: Sequence) -> None:
        size = self.info.block_size
        if self.scheduler.blocks.prefix_caching:
            digests = sequence.digests(sequence.num_tokens // size, size)
            self._hot.note(sequence.token_ids, sequence.root, digests)

    def _name(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Outputs under the names of their requests; samples enter the line whose prompt is there now."""
        if not len(self._samples):
            return outputs
        named, entering = self._samples.note(outputs)
        for one in entering:
            self.scheduler.add(one)
        return named

    def _due_in(self, now: float) -> float | None:
        scheduler, waiting = self.scheduler, self.scheduler.waiting
        if scheduler.running:
            return 0.0
        oldest = waiting.oldest_arrival
        if oldest is None:
            return None
        if self._retry_at is not None:
            return max(0.0, self._retry_at - now)
        limits = scheduler.limits
        full = len(waiting) >= limits.max_batch_size or waiting.num_tokens >= limits.max_tokens_in_batch
        return max(0.0, self._window.due(oldest, now, full=full) - now)

    def _expire(self, now: float) -> list[TokenOutput]:
        expired = self.scheduler.expire(now)
        for output in expired:
            self.admission.forget(output.request_id)
        return expired

    def _wait_for_disk(self, now: float) -> None:
        """Nothing can be computed before a block has come from disk: look again in a moment."""
        self._begin_file_jobs()
        self._retry_at = now + _DISK_POLL_SECONDS

    def _begin_file_jobs(self) -> None:
        """Only where no copy is outstanding: a job may read what a copy writes."""
        if self._traffic is not None:
            self._traffic.send()

    def _account(self, plan: list[Scheduled], begin: float, scheduled: float, executed: float) -> None:
        self._steps += 1
        self._computed_tokens += sum(item.count for item in plan)
        self._last_plan = plan
        self._stage_seconds["schedule"] += scheduled - begin
        self._stage_seconds["execute"] += executed - scheduled
        self._stage_seconds["update"] += self._clock() - executed
