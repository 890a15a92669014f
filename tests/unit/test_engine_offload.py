"""Blocks that the device evicts go to host memory and disk, and come back; what is not whole is a miss."""

import pytest

from paceline_server.engine.batch import CopyKind
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import GenerationRequest
from paceline_server.engine.offload import FileAction, FileJob, FileResult, OffloadTier
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeFiles, FakeRunner, expected_tokens, model_info

PROMPT = list(range(1, 18))  # four full blocks of four, and a token


class Bench:
    """A core on a pool of eight blocks, with a clock of its own: a hundredth of a second a look."""

    def __init__(self, slots=16, files=0, stored=None, delay=1, identity="", **info):
        model = model_info(
            num_blocks=8, offload_slots=slots, offload_files=files, kv_identity=identity, **{"swap_slots": 3, **info}
        )
        self.runner = FakeRunner(model)
        self.files = FakeFiles(self.runner, delay)
        self.files.blocks = stored if stored is not None else {}
        self.now = 0.0
        self.core = EngineCore(
            self.runner, model, SchedulerLimits(2, 64), files=self.files if files else None, clock=self.clock
        )

    def clock(self):
        self.now += 0.01
        return self.now

    def ask(self, prompt, max_tokens=3, **options):
        """Tokens of a request alone, and the prompt tokens that came from the cache; the books hold after each step."""
        self.core.submit(GenerationRequest("r", prompt, max_tokens, ignore_eos=True, **options))
        outputs = []
        for _ in range(1_000):
            if not self.core.has_work:
                break
            outputs += self.core.step()
            self.core.scheduler.check_integrity()
        assert not self.core.has_work
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == expected_tokens(prompt, max_tokens)
        return outputs[-1].cached_tokens

    def evict(self, times=1):
        """Run requests that leave nothing of what was cached on the device."""
        for number in range(times):
            self.ask([60 + number] * 28, 2)

    def event(self, name):
        return self.core.stats().offloaded_blocks[name]


def test_an_evicted_prefix_comes_back_from_host_memory():
    bench = Bench()
    bench.ask(PROMPT)
    bench.evict()
    assert bench.ask(PROMPT) == 16
    assert bench.event("returned") == 4
    kinds = [copy.kind for batch in bench.runner.batches for copy in batch.copies]
    assert {CopyKind.OUT, CopyKind.IN} == set(kinds)


def test_without_offload_an_evicted_prefix_is_computed_anew():
    bench = Bench(slots=0)
    bench.ask(PROMPT)
    bench.evict()
    assert bench.ask(PROMPT) == 0


def test_host_memory_that_is_full_lets_the_least_recently_used_go():
    bench = Bench(slots=5)
    bench.ask(PROMPT)
    bench.evict(3)
    assert bench.ask(PROMPT) == 0


def test_what_host_memory_is_too_small_for_comes_back_from_disk():
    bench = Bench(slots=8, files=100)
    bench.ask(PROMPT)
    bench.evict(6)
    assert bench.ask(PROMPT) == 16
    assert bench.event("read") > 0
    assert bench.event("failed_reads") == 0


def test_blocks_on_disk_outlive_the_process():
    first = Bench(slots=8, files=100)
    first.ask(PROMPT)
    first.evict(6)
    second = Bench(slots=8, files=100, stored=first.files.blocks)
    assert second.ask(PROMPT) == 16


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_file_that_is_gone_or_damaged_is_a_miss(harm):
    first = Bench(slots=8, files=100)
    first.ask(PROMPT)
    first.evict(6)
    blocks = first.files.blocks
    second = Bench(slots=8, files=100, stored=dict(blocks))
    for digest in blocks:
        if harm == "missing":
            del second.files.blocks[digest]
        else:
            second.files.blocks[digest] = None
    assert second.ask(PROMPT) == 0
    assert second.event("failed_reads") > 0
    assert second.core.scheduler.tables.tier.slot_of(next(iter(blocks))) is None


def test_another_model_or_salt_finds_nothing_on_disk():
    first = Bench(slots=8, files=100, identity="revision 1")
    first.ask(PROMPT, cache_salt="s1")
    first.evict(6)
    for identity, salt, cached in (("revision 2", "s1", 0), ("revision 1", "s2", 0), ("revision 1", "s1", 16)):
        other = Bench(slots=8, files=100, stored=dict(first.files.blocks), identity=identity)
        assert other.ask(PROMPT, cache_salt=salt) == cached


def test_a_disk_that_never_answers_delays_a_request_by_a_bounded_time():
    first = Bench(slots=8, files=100)
    first.ask(PROMPT)
    first.evict(6)
    second = Bench(slots=8, files=100, stored=first.files.blocks, delay=10_000)
    assert second.ask(PROMPT) == 0
    assert second.now < 5.0


@pytest.mark.parametrize("slots", [6, 8, 10, 12, 16])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_prefixes_that_host_memory_does_not_hold_together_are_not_read_without_end(slots, delay):
    prompts = [[10 + number, *range(1, 25)] for number in range(3)]  # six blocks each
    first = Bench(slots=64, files=1000)
    for prompt in prompts:
        first.ask(prompt)
    first.evict(20)

    second = Bench(slots=slots, files=1000, stored=first.files.blocks, delay=delay)
    for number, prompt in enumerate(prompts):
        second.core.submit(GenerationRequest(str(number), prompt, 3, ignore_eos=True))
    for _ in range(2_000):
        second.core.step()
        second.core.scheduler.check_integrity()
    assert not second.core.has_work
    assert second.event("read") < 1_000


def test_a_prefix_that_host_memory_does_not_hold_does_not_push_itself_out():
    tier = OffloadTier(range(2), disk_blocks=10, stored=[b"a", b"b", b"c"])
    prefix = [b"a", b"b", b"c"]
    assert tier.fetch(prefix, prefix)
    tier.note([FileResult(job, ok=True) for job in tier.take_jobs()], now=0.1)
    assert not tier.fetch([b"c"], prefix)
    assert tier.slot_of(b"a") is not None


def test_others_run_while_one_waits_for_the_disk():
    first = Bench(slots=8, files=100)
    first.ask(PROMPT)
    first.evict(6)
    second = Bench(slots=8, files=100, stored=first.files.blocks, delay=10)
    second.core.submit(GenerationRequest("waits", PROMPT, 2, ignore_eos=True))
    second.core.submit(GenerationRequest("runs", [9, 9], 4, ignore_eos=True))
    names = [output.request_id for _ in range(40) for output in second.core.step()]
    assert names[0] == "runs"
    assert names.count("waits") == 2


def test_a_request_that_is_aborted_while_it_waits_for_the_disk_leaves_an_idle_engine():
    first = Bench(slots=8, files=100)
    first.ask(PROMPT)
    first.evict(6)
    second = Bench(slots=8, files=100, stored=first.files.blocks, delay=50)
    second.core.submit(GenerationRequest("waits", PROMPT, 2))
    second.core.step()
    assert second.core.due_in() is not None
    second.core.abort("waits")
    assert second.core.due_in() is None


def test_no_more_files_are_kept_than_allowed():
    tier = OffloadTier(range(4), disk_blocks=3, stored=[bytes([number]) for number in range(5)])
    deleted = [job.digest for job in tier.take_jobs()]
    assert deleted == [b"\x00", b"\x01"], "the least recently used go first"
    tier.check_integrity()


def test_a_block_whose_write_failed_is_kept_while_there_is_room_and_then_let_go():
    tier = OffloadTier(range(2), disk_blocks=10)
    assert tier.store(b"a") is not None
    assert tier.store(b"b") is not None
    job, _ = tier.take_jobs()
    assert (job.action, job.digest) == (FileAction.WRITE, b"a")
    assert tier.store(b"c") is None, "both are being written"
    tier.note([FileResult(job, ok=False)], now=1.0)
    tier.check_integrity()
    assert tier.slot_of(b"a") is not None
    assert tier.store(b"c") == job.slot
    tier.check_integrity()


def test_writes_go_on_when_hits_have_left_nothing_but_unwritten_blocks_where_a_slot_is_looked_for():
    tier = OffloadTier(range(200), disk_blocks=1_000)
    for number in range(200):
        assert tier.store(bytes([number])) is not None
    written = tier.take_jobs()
    tier.note([FileResult(job, ok=True) for job in written], now=0.0)
    tier.touch([job.digest for job in written])
    assert tier.store(b"new") is None, "what may go stands behind what may not"
    for step in range(1, 10):
        tier.note([FileResult(job, ok=True) for job in tier.take_jobs()], now=float(step))
        tier.check_integrity()
    assert tier.totals.written == 200
    assert tier.store(b"new") is not None


def test_an_idle_engine_writes_what_its_disk_was_too_slow_for():
    bench = Bench(slots=128, files=1_000, delay=50)
    bench.evict(16)
    assert bench.event("written") < bench.event("stored")
    for _ in range(400):
        bench.core.step()
    assert bench.event("written") == bench.event("stored") > 64


def test_a_block_that_the_device_evicts_again_is_written_after_those_that_go_before_it():
    tier = OffloadTier(range(4), disk_blocks=10)
    for digest in (b"a", b"b", b"a", b"c"):
        tier.store(digest)
    assert [job.digest for job in tier.take_jobs()] == [b"b", b"a", b"c"]


def test_a_read_that_fails_is_told_to_the_disk_and_gives_its_slot_back():
    tier = OffloadTier(range(2), disk_blocks=10, stored=[b"a"])
    assert tier.fetch([b"a", b"b"], [b"a", b"b"])
    (job,) = tier.take_jobs()
    tier.check_integrity()
    tier.note([FileResult(job, ok=False)], now=1.0)
    assert not tier.fetch([b"a"], [b"a"])
    assert tier.take_jobs() == [FileJob(FileAction.DELETE, b"a")]
    tier.check_integrity()
