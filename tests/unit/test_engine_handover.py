"""A fresh replica takes over what another one has found hot, without the salts, and never at the price of its start."""

import json
import socket
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from threading import Event, Thread

import pytest

from paceline_server.config import HandoverConfig
from paceline_server.engine.blocks import chain_hash, root_hash
from paceline_server.engine.core import EngineCore
from paceline_server.engine.handover import compute, parse_prefixes, prefixes_json, take_over
from paceline_server.engine.hot_prefixes import HotPrefixes
from paceline_server.engine.interface import GenerationRequest
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, model_info

SYSTEM = list(range(1, 25))  # six blocks of four


def make_core(identity="m", blocks=64, deterministic=True, **options):
    info = replace(model_info(num_blocks=blocks), kv_identity=identity, deterministic=deterministic)
    return EngineCore(FakeRunner(info), info, SchedulerLimits(4, 64), **options)


def ask(core, prompt, salt="", **options):
    """Prompt tokens that came from the cache."""
    core.submit(GenerationRequest("r", prompt, 1, ignore_eos=True, cache_salt=salt, **options))
    cached = 0
    while core.has_work:
        for output in core.step():
            cached = output.cached_tokens
    return cached


def warm():
    core = make_core()
    for number in range(5):
        ask(core, [*SYSTEM, 30 + number], salt="tenant a")
    ask(core, [40] * 20, salt="tenant b")  # asked once
    return core


def test_a_fresh_replica_finds_the_shared_prefix_under_its_salt_and_under_no_other(tmp_path):
    found = warm().hot_prefixes("q", 8)
    assert [list(one.token_ids) for one in found.prefixes] == [SYSTEM], "what was asked once is told to nobody"
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps(prefixes_json(found)))
    assert "tenant" not in file.read_text()

    fresh = make_core()
    assert take_over(fresh, HandoverConfig(peer=str(file))) == 1
    assert not fresh.has_work
    assert ask(fresh, [*SYSTEM, 77], salt="tenant b") == 0
    assert ask(fresh, [*SYSTEM, 77], salt="tenant a") == len(SYSTEM)


@pytest.mark.parametrize("able", [True, False])
def test_what_deterministic_requests_find_there_is_computed_as_they_are(able):
    core = make_core()
    for number in range(3):
        ask(core, [*SYSTEM, 30 + number], deterministic=True)
    found = core.hot_prefixes("q", 8)

    fresh = make_core(deterministic=able)
    assert compute(fresh, found.prefixes, lambda: True) == 1
    computed = [piece.deterministic for batch in fresh._runner.batches for piece in batch.slices]
    assert computed
    assert all(computed) == able
    if able:
        assert ask(fresh, [*SYSTEM, 77], deterministic=True) == len(SYSTEM)


def test_the_list_of_another_model_is_not_taken(tmp_path):
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps(prefixes_json(warm().hot_prefixes("q", 8))))
    fresh = make_core(identity="another")
    assert take_over(fresh, HandoverConfig(peer=str(file))) == 0
    assert fresh.stats().steps == 0


def listed(token_ids="[1]", uses="1"):
    return f'{{"identity": "m", "prefixes": [{{"root": "00", "token_ids": {token_ids}, "uses": {uses}}}]}}'


NONSENSE = ["", "[]", "{}", '{"identity": "m", "prefixes": [{"root": "zz"}]}', '{"prefixes": 5}']
NO_NUMBERS = [listed(token_ids="[1e999]"), listed(uses="1e999"), listed(token_ids="[NaN]"), "[" * 100_000, "1" * 9_999]


@pytest.mark.parametrize("text", NONSENSE + NO_NUMBERS, ids=lambda text: text[:70])
def test_a_peer_that_is_not_there_or_talks_nonsense_leaves_a_cold_start(tmp_path, text):
    file = tmp_path / "prefixes.json"
    if text:
        file.write_text(text)
    fresh = make_core()
    assert take_over(fresh, HandoverConfig(peer=str(file))) == 0
    assert take_over(fresh, HandoverConfig(peer="http://127.0.0.1:9")) == 0
    assert ask(fresh, [*SYSTEM, 77]) == 0


@contextmanager
def peer(*parts, then=b""):
    """A peer that sends these bytes, whatever it is asked, and then a few more again and again till it is closed."""
    closed = Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"".join(parts))
                while then and not closed.wait(0.01):
                    connection.sendall(then)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", closed
        closed.set()
        thread.join()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"what?\r\n\r\n",
        OK + b"X: " + b"x" * 70_000 + b"\r\n\r\n",
        OK + b"Content-Length: 100\r\n\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ],
    ids=["no HTTP", "a header without end", "cut short", "no chunk", "nothing"],
)
def test_a_peer_that_does_not_speak_http_leaves_a_cold_start(answer):
    fresh = make_core()
    with peer(answer) as (url, _):
        assert take_over(fresh, HandoverConfig(peer=url)) == 0
    assert take_over(fresh, HandoverConfig(peer="http://no host/")) == 0
    assert ask(fresh, [*SYSTEM, 77]) == 0


@pytest.mark.parametrize("head", [OK + b"Content-Length: 1000000\r\n\r\n", OK + b"X: "], ids=["its list", "a header"])
def test_a_peer_that_never_ends_its_answer_does_not_hold_up_the_start(head):
    with peer(head, then=b"[") as (url, closed):
        assert take_over(make_core(), HandoverConfig(peer=url, max_seconds=0.1)) == 0
        assert not closed.is_set()


def test_the_time_for_it_is_bounded_and_what_is_unfinished_is_dropped():
    found = warm().hot_prefixes("q", 8)
    fresh = make_core()
    steps = count()
    assert compute(fresh, found.prefixes * 3, lambda: next(steps) < 1) == 0
    assert not fresh.has_work
    fresh.scheduler.check_integrity()


def test_half_the_pool_is_left_to_what_comes():
    fresh = make_core(blocks=16)
    prefixes = [replace(one, token_ids=[n + 1] * 16) for n, one in enumerate(warm().hot_prefixes("q", 8).prefixes * 8)]
    assert compute(fresh, prefixes, lambda: True) == 2


def test_tokens_outside_the_vocabulary_and_prefixes_too_long_are_left_out():
    fresh = make_core()
    (one,) = warm().hot_prefixes("q", 8).prefixes
    strange = [replace(one, token_ids=[1000] * 4), replace(one, token_ids=[-1] * 4), replace(one, token_ids=())]
    assert compute(fresh, [*strange, one], lambda: True) in (1, 2)
    assert ask(fresh, [*SYSTEM, 77], salt="tenant a") == len(SYSTEM)


def chained(tokens, root, size=2):
    digests, parent = [], root
    for begin in range(0, len(tokens) - size + 1, size):
        parent = chain_hash(parent, tokens[begin : begin + size])
        digests.append(parent)
    return digests


def note(hot, tokens, salt="", times=1):
    root = root_hash("m", salt)
    for _ in range(times):
        hot.note(tokens, root, chained(tokens, root))


def test_what_saves_most_goes_first_and_a_beginning_of_a_listed_one_is_not_listed_again():
    hot = HotPrefixes(block_size=2)
    note(hot, [1] * 20, times=10)
    note(hot, [1] * 20 + [2] * 4, times=3)
    note(hot, [3] * 6, times=4)
    note(hot, [4] * 40)
    found = hot.hottest(8, 1_000)
    assert [list(one.token_ids) for one in found] == [[1] * 20 + [2] * 4, [3] * 6]


def test_the_list_is_bounded_in_prefixes_and_tokens_and_the_book_in_blocks():
    hot = HotPrefixes(block_size=2, max_nodes=10)
    for number in range(50):
        note(hot, [number] * 8, times=2)
    assert len(hot) == 10
    assert len(hot.hottest(1, 1_000)) == 1
    assert sum(len(one.token_ids) for one in hot.hottest(9, 10)) <= 10


class CountedLooks(OrderedDict):
    """Counts how often a node is looked up."""

    looks = 0

    def get(self, key, default=None):
        self.looks += 1
        return super().get(key, default)

    def __getitem__(self, key):
        self.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("max_tokens", [0, 20, 200, 100_000])
def test_telling_them_costs_no_more_than_a_few_looks_at_each_block(max_tokens):
    hot = HotPrefixes(block_size=2)
    for number in range(4):
        note(hot, [number] * 400, times=2)
    hot._nodes = CountedLooks(hot._nodes)
    assert sum(len(one.token_ids) for one in hot.hottest(8, max_tokens)) <= max_tokens
    assert hot._nodes.looks <= 3 * len(hot)


def test_equal_tokens_under_two_salts_are_two_prefixes():
    hot = HotPrefixes(block_size=2)
    note(hot, [1] * 4, "a", times=2)
    note(hot, [1] * 4, "b", times=2)
    assert len({one.root for one in hot.hottest(8, 100)}) == 2


def test_what_is_written_is_read_back():
    found = warm().hot_prefixes("q", 8)
    again = parse_prefixes(json.dumps(prefixes_json(found)))
    assert again.identity == found.identity
    assert [(one.root, tuple(one.token_ids), one.uses) for one in again.prefixes] == [
        (one.root, tuple(one.token_ids), one.uses) for one in found.prefixes
    ]
