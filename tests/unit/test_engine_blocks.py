"""The block manager's books."""

from itertools import product, takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline_server.engine.blocks import BlockManager, FreeList, chain_hash, root_hash


def test_the_free_list_gives_back_the_least_recently_used_block_first():
    free = FreeList(4)
    assert [free.pop(), free.pop()] == [0, 1]
    free.push(1)
    free.push_first(0)
    assert list(free) == [0, 2, 3, 1]
    free.remove(3)
    assert [free.pop() for _ in range(len(free))] == [0, 2, 1]


def test_equal_tokens_after_different_prefixes_or_salts_have_different_hashes():
    root = root_hash("")
    first = chain_hash(root, [1, 2])
    assert chain_hash(first, [3, 4]) != chain_hash(root, [3, 4])
    assert chain_hash(root_hash("tenant a"), [1, 2]) != first
    assert chain_hash(root, [1, 2]) == first


def test_no_salt_spells_other_keys():
    keys = ["a", "deterministic", "", "\0", "1:a", "a\0deterministic", "a13:deterministic"]
    spelt = {root_hash(*some) for count in (1, 2) for some in product(keys, repeat=count)}
    assert len(spelt) == len(keys) + len(keys) ** 2


def test_a_released_prefix_is_found_again_until_its_blocks_are_handed_out():
    manager = BlockManager(4, block_size=2)
    digests = [chain_hash(root_hash(""), [1, 2]), b"second"]
    table = manager.allocate(2)
    for block, digest in zip(table, digests, strict=True):
        manager.publish(block, digest)
    manager.release(table)
    assert [manager.block_of(one) for one in digests] == table
    manager.check_integrity([])

    manager.allocate(3)  # two blank ones, then the least recently used cached one: the prefix's tail
    assert [manager.block_of(one) for one in digests] == [table[0], None]


def test_holding_a_cached_block_keeps_it_from_being_handed_out():
    manager = BlockManager(2, block_size=2)
    table = manager.allocate(1)
    manager.publish(table[0], b"digest")
    manager.release(table)
    assert manager.num_free_without(table) == 1
    manager.hold(table)
    assert manager.num_free == 1
    assert manager.allocate(1) != table
    assert [manager.block_of(b"digest")] == table


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(2, block_size=2, prefix_caching=False)
    table = manager.allocate(1)
    manager.publish(table[0], b"digest")
    assert manager.block_of(b"digest") is None


class BlockBooks(RuleBasedStateMachine):
    """Random allocations, shared prefixes and releases never break the books."""

    @initialize(size=st.integers(1, 12))
    def start(self, size):
        self.manager = BlockManager(size, block_size=2)
        self.tables: list[list[int]] = []
        self.published = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        if count <= self.manager.num_free:
            self.tables.append(self.manager.allocate(count))

    @rule(data=st.data())
    def publish(self, data):
        if self.tables:
            block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
            self.manager.publish(block, data.draw(st.sampled_from([b"a", b"b", b"c", b"d", b"e"])))

    @rule(digests=st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), min_size=1, max_size=3, unique=True))
    def share(self, digests):
        found = (self.manager.block_of(digest) for digest in digests)
        prefix = list(takewhile(lambda block: block is not None, found))
        if prefix:
            self.manager.hold(prefix)
            self.tables.append(prefix)

    @rule(data=st.data())
    def release(self, data):
        if self.tables:
            index = data.draw(st.integers(0, len(self.tables) - 1))
            self.manager.release(self.tables.pop(index))

    @invariant()
    def books_agree(self):
        if hasattr(self, "manager"):
            self.manager.check_integrity(self.tables)


BlockBooks.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestBlockBooks = BlockBooks.TestCase
