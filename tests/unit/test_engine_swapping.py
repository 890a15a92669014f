"""Preemption by the cheaper of two ways: computing again, or host memory and back."""

import pytest

from paceline_server.engine.batch import CopyKind
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import GenerationRequest
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.steptime import StepShape, StepTimeModel
from paceline_server.engine.swapping import PreemptionCosts, SwapSpace
from paceline_server.engine.testing import TimedRunner, expected_tokens, model_info

PROMPTS = {f"r{index}": [index + 1] * 8 for index in range(6)}


def overcommitted(swap_slots, copy_seconds=0.0, prefix_caching=True):
    """Six requests of 32 tokens on a pool of 48; runs to the end, books checked after every step."""
    info = model_info(num_blocks=12, swap_slots=swap_slots, block_copy_seconds=copy_seconds)
    machine = TimedRunner(info)
    core = EngineCore(machine, info, SchedulerLimits(6, 16), prefix_caching=prefix_caching, clock=machine)
    for name, prompt in PROMPTS.items():
        core.submit(GenerationRequest(name, prompt, 24, ignore_eos=True))
    tokens = {name: [] for name in PROMPTS}
    for _ in range(2_000):
        if not core.has_work:
            break
        for output in core.step():
            tokens[output.request_id] += output.token_ids
        core.scheduler.check_integrity()
    assert not core.has_work, "no progress"
    assert core.stats().preemptions > 0
    assert tokens == {name: expected_tokens(prompt, 24) for name, prompt in PROMPTS.items()}
    return core, machine


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_swapped_sequences_go_on_where_they_were_and_compute_nothing_twice(prefix_caching):
    core, machine = overcommitted(swap_slots=40, prefix_caching=prefix_caching)
    stats = core.stats()
    assert stats.swapped_out_blocks == machine.copies[CopyKind.OUT] > 0
    assert 0 < stats.swapped_in_blocks == machine.copies[CopyKind.IN] <= stats.swapped_out_blocks
    assert stats.computed_tokens == len(PROMPTS) * (8 + 24 - 1)


def test_where_copying_is_dearer_the_tokens_are_computed_again():
    core, machine = overcommitted(swap_slots=40, copy_seconds=1.0)
    assert core.stats().swapped_out_blocks == 0
    assert sum(machine.copies.values()) == 0
    assert core.stats().computed_tokens > len(PROMPTS) * (8 + 24 - 1)


def test_a_swap_space_that_is_too_small_for_a_sequence_leaves_it_to_be_computed_again():
    core, _ = overcommitted(swap_slots=1)
    assert core.stats().swapped_out_blocks <= core.stats().preemptions
    assert core.stats().computed_tokens > len(PROMPTS) * (8 + 24 - 1)


def test_an_abort_while_swapped_out_gives_the_slots_back():
    info = model_info(num_blocks=12, swap_slots=40)
    machine = TimedRunner(info)
    core = EngineCore(machine, info, SchedulerLimits(6, 16), clock=machine)
    for name, prompt in PROMPTS.items():
        core.submit(GenerationRequest(name, prompt, 24, ignore_eos=True))
    while not any(one.parked for one in core.scheduler.waiting):
        core.step()
    for name in PROMPTS:
        core.abort(name)
    assert not core.has_work
    core.scheduler.check_integrity()


def test_the_longer_the_sequence_the_more_a_swap_saves():
    model = StepTimeModel()
    for tokens, start in ((1, 10), (64, 0), (128, 512), (256, 0), (1, 900), (200, 400)):
        shape = StepShape.of([(start, tokens)])
        model.observe(shape, 0.005 + 1e-4 * shape.tokens + 1e-6 * shape.pairs)
    costs = PreemptionCosts(model, copy_seconds=0.001)
    assert not costs.swap_is_cheaper(tokens=8, blocks=1)
    assert costs.swap_is_cheaper(tokens=1024, blocks=64)


def test_without_a_measured_step_nothing_is_swapped():
    assert not PreemptionCosts(StepTimeModel(), copy_seconds=0.0).swap_is_cheaper(tokens=1000, blocks=63)


def test_a_slot_that_is_held_twice_or_lost_is_noticed():
    space = SwapSpace(3)
    slots = space.take(2)
    space.check_integrity(list(slots))
    with pytest.raises(AssertionError, match="slot"):
        space.check_integrity([slots[0], slots[0]])
    space.give_back(slots)
    with pytest.raises(AssertionError, match="slot"):
        space.check_integrity(list(slots))
