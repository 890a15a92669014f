"""The heap under the waiting lines."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from paceline_server.engine.heap import LazyHeap

names = st.sampled_from("abcdefgh")
operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), names, st.integers(0, 4)),
        st.tuples(st.just("remove"), names, st.just(0)),
        st.tuples(st.just("first"), st.just(""), st.just(0)),
    ),
    max_size=60,
)


@given(operations)
def test_it_behaves_as_a_dictionary_that_is_sorted_by_key_and_name(operations):
    heap, model = LazyHeap(), {}
    for operation, name, key in operations:
        if operation == "push":
            heap.push(name, float(key), name)
            model[name] = float(key)
        elif operation == "remove":
            assert heap.remove(name) == (name if name in model else None)
            model.pop(name, None)
        smallest = min(model, key=lambda one: (model[one], one), default=None)
        assert heap.first() == (None if smallest is None else (model[smallest], smallest))
        assert len(heap) == len(model)
        assert set(heap) == set(model)
        leading, ordered = heap.leading(3), sorted((key, one) for one, key in model.items())
        assert leading == ordered[: len(leading)]
        assert bool(leading) == bool(model)
        assert all(heap.get(one) == one and one in heap for one in model)


def test_the_order_survives_the_dead_being_swept_out():
    heap, random = LazyHeap(), Random(1)
    keys = {str(number): random.random() for number in range(1_000)}
    for name, key in keys.items():
        heap.push(name, key, name)
    for number in range(0, 1_000, 4):
        for other in range(number, number + 3):
            heap.remove(str(other))
            del keys[str(other)]
    order = []
    while heap.first() is not None:
        order.append(heap.remove(heap.first()[1]))
    assert order == sorted(keys, key=keys.get)


def test_the_leading_entries_are_the_first_ones_in_order_also_behind_dead_ones():
    heap, random = LazyHeap(), Random(2)
    keys = random.sample(range(1_000), 100)
    for key in keys:
        heap.push(str(key), float(key), key)
    ordered = sorted(keys)
    assert [item for _, item in heap.leading(8)] == ordered[:8]
    for key in ordered[1:5]:
        heap.remove(str(key))
    assert [item for _, item in heap.leading(4)] == [ordered[0], *ordered[5:8]]


def test_equal_keys_go_by_their_tie():
    heap = LazyHeap()
    heap.push("later", 1.0, "later", tie=2)
    heap.push("sooner", 1.0, "sooner", tie=1)
    assert heap.first() == (1.0, "sooner")


def test_dead_entries_never_outnumber_the_living_by_more_than_a_constant():
    heap = LazyHeap()
    for number in range(2_000):
        heap.push(str(number), float(number), number)
    for number in range(1, 2_000):  # the first one stays, so nothing dead ever comes to the top
        heap.remove(str(number))
        assert len(heap._heap) <= 2 * len(heap) + 64
    for number in range(500):
        heap.push("moving", float(number), number)
        assert len(heap._heap) <= 2 * len(heap) + 64


def test_items_are_taken_out_up_to_a_key_in_order_though_others_go_meanwhile() -> None:
    heap: LazyHeap[float, str] = LazyHeap()
    for name, key in (("c", 3.0), ("a", 1.0), ("d", 4.0), ("b", 2.0)):
        heap.push(name, key, name)
    taken = []
    for item in heap.pop_until(3.0):
        taken.append(item)
        heap.remove("b")
    assert taken == ["a", "c"]
    assert list(heap) == ["d"]
