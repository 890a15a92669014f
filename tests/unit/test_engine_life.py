"""20,000 steps of one engine on a pool that is always too small, the books checked after every one of them.

Requests for one and for several answers come, share prefixes, fork, are preempted, swapped, evicted, offloaded to host
memory and disk, damaged there, found again, cut, aborted and timed out. ENGINE_LIFE_STEPS=200000 makes it longer and
ENGINE_LIFE_SEED another life.
"""

import os
from random import Random

import pytest

from paceline_server.config import SchedulingConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason, GenerationRequest, Tier
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeFiles, TimedRunner, expected_tokens, model_info

STEPS = int(os.environ.get("ENGINE_LIFE_STEPS", "20000"))
SEED = int(os.environ.get("ENGINE_LIFE_SEED", "0"))
PREFIXES = ([1] * 20, [1] * 8 + [2] * 16, [3] * 30, list(range(1, 14)))


class Life:
    """An engine, what it was asked, and what it must answer."""

    def __init__(self, seed):
        self.random = Random(seed)
        info = model_info(num_blocks=24, swap_slots=20, offload_slots=12, offload_files=30, block_copy_seconds=0.0004)
        self.machine = TimedRunner(info, fixed=0.002)
        self.files = FakeFiles(self.machine, delay=3)
        self.core = EngineCore(
            self.machine,
            info,
            SchedulerLimits(5, 24, 0.05),
            SchedulingConfig(admission="none", promote_after_seconds=0.3),
            files=self.files,
            clock=self.machine,
        )
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.ends = dict.fromkeys(FinishReason, 0)
        self.count = 0

    def arrive(self):
        random, name = self.random, str(self.count)
        prefix = random.choice(PREFIXES)
        prompt = [
            *prefix[: random.randint(1, len(prefix))],
            *(random.randint(4, 40) for _ in range(random.randint(1, 5))),
        ]
        n, output = random.choice([1, 1, 1, 2, 4]), random.randint(1, 24)
        self.count += 1
        options = {"tier": random.choice(list(Tier)), "tenant": random.choice("ab"), "cache_salt": random.choice("xxy")}
        timeout = random.choice([None, None, None, 0.2, 2.0])
        self.core.submit(GenerationRequest(name, prompt, output, ignore_eos=True, n=n, timeout=timeout, **options))
        for index in range(n):
            self.expected[name, index] = expected_tokens(prompt, output)

    def leave(self):
        name, index = self.random.choice(sorted(self.expected))
        if self.random.random() < 0.5:
            self.core.abort(name, index)
            del self.expected[name, index]
        else:
            self.core.abort(name)
            self.expected = {key: value for key, value in self.expected.items() if key[0] != name}

    def harm(self):
        if self.files.blocks:
            digest = self.random.choice(sorted(self.files.blocks))
            self.files.blocks[digest] = None

    def step(self):
        for output in self.core.step():
            self.take(output)
        self.machine.now += 0.003
        self.machine.batches.clear()
        self.core.scheduler.check_integrity()

    def take(self, output):
        key = output.request_id, output.index
        assert key in self.expected, "output after the end"
        tokens, self.expected[key] = self.expected[key], self.expected[key][len(output.token_ids) :]
        assert list(output.token_ids) == tokens[: len(output.token_ids)]
        if output.finish is not None:
            self.ends[output.finish] += 1
            assert output.finish is FinishReason.TIMEOUT or not self.expected[key], "ended too early"
            del self.expected[key]


@pytest.mark.timeout(1200)
def test_in_20_000_steps_no_block_or_slot_is_lost_doubled_or_stale_and_every_token_is_right():
    life = Life(SEED)
    for _ in range(STEPS):
        chance = life.random.random()
        if chance < 0.20 and len(life.expected) < 16:
            life.arrive()
        elif chance < 0.23 and life.expected:
            life.leave()
        elif chance < 0.24:
            life.harm()
        life.step()
    for _ in range(5_000):
        if not life.core.has_work:
            break
        life.step()
    assert not life.core.has_work, "something never ended"
    assert life.expected == {}
    assert len(life.core._samples) == 0
    stats = life.core.stats()
    assert stats.kv_usage == 0.0
    assert all(life.machine.copies.values()), "nothing was forked, stored or brought back"
    assert min(stats.preemptions, stats.swapped_out_blocks, stats.swapped_in_blocks) > 20
    assert all(count > 0 for count in stats.offloaded_blocks.values()), stats.offloaded_blocks
    assert life.ends[FinishReason.LENGTH] > 100
    assert life.ends[FinishReason.TIMEOUT] > 20
