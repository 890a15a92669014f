"""Prefixes that requests share are computed once, under one salt, also while they are being computed."""

from stepping import make_core, request, run, started

from paceline_server.engine.testing import expected_tokens


def test_a_repeated_prompt_comes_from_the_prefix_cache_and_changes_nothing():
    core, runner = make_core()
    prompt = list(range(1, 19))
    core.submit(request("first", prompt))
    first, _ = run(core)
    runner.batches.clear()
    core.submit(request("second", prompt))
    second, _ = run(core)
    assert second["second"] == first["first"]
    assert runner.batches[0].slices[0].start == 16  # four full blocks of four; the last tokens are computed
    assert core.stats().prefix_hit_tokens == 16


def test_another_salt_finds_nothing_in_the_prefix_cache():
    core, runner = make_core()
    prompt = list(range(1, 19))
    core.submit(request("first", prompt, cache_salt="tenant a"))
    run(core)
    runner.batches.clear()
    core.submit(request("second", prompt, cache_salt="tenant b"))
    run(core)
    assert runner.batches[0].slices[0].start == 0


def test_nobody_waits_for_a_prefix_that_is_computed_under_another_salt():
    """Waiting would tell that somebody else has just sent the same prompt, and it would be for nothing."""
    core, runner = make_core(batch=4, budget=8)
    prompt = list(range(1, 60))  # so much longer than its beginning that both are computed in one step
    core.submit(request("first", prompt, cache_salt="tenant a"))
    core.step()
    core.submit(request("second", prompt[:20], cache_salt="tenant b"))
    core.step()
    assert [piece.start for piece in runner.batches[-1].slices] == [8, 0]
    tokens, _ = run(core)
    assert tokens["second"] == expected_tokens(prompt[:20], 5)
    assert core.stats().prefix_hit_tokens == 0


def test_requests_that_share_a_prefix_which_is_being_computed_wait_for_it_instead_of_computing_it_too():
    core, runner = make_core(batch=32, budget=32, num_blocks=200, block_size=4)
    shared = list(range(1, 41)) * 2
    prompts = {f"r{index}": [*shared, index + 1, index + 2] for index in range(20)}
    for name, prompt in prompts.items():
        core.submit(request(name, prompt, 2))
    core.submit(request("other", [45] * 6, 2))
    core.step()
    second = core.step()
    assert {output.request_id for output in second} == {"other"}, "nobody else is held up by them"
    tokens, _ = run(core)
    assert {name: tokens[name] for name in prompts} == {n: expected_tokens(p, 2) for n, p in prompts.items()}
    computed = sum(batch.num_tokens for batch in runner.batches)
    assert computed <= len(shared) + 20 * (2 + 4 + 2) + 8, "the prefix once, and a block's rest for each"


def test_when_the_one_that_computes_a_shared_prefix_is_aborted_the_next_computes_it():
    core, runner = make_core(batch=8, budget=16, num_blocks=200, block_size=4)
    shared = list(range(1, 61))
    for name in ("first", "second", "third"):
        core.submit(request(name, [*shared, ord(name[0]) % 40], 2))
    core.step()
    assert started(core) == {"first"}
    core.abort("first")
    core.step()
    assert started(core) == {"second"}
    tokens, _ = run(core)
    assert {name: len(got) for name, got in tokens.items()} == {"second": 2, "third": 2}
    assert sum(batch.num_tokens for batch in runner.batches) < 16 + 2 * 61


def test_without_a_prefix_cache_nobody_waits_for_a_prefix():
    core, _ = make_core(batch=8, budget=16, num_blocks=200, block_size=4, prefix_caching=False)
    for index, length in enumerate((60, 20, 20)):  # the first is so much longer that it shares the steps
        core.submit(request(f"r{index}", [*range(1, length), index + 1], 2))
    core.step()
    core.step()
    assert len(core.scheduler.running) > 1
