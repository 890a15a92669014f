"""The step loop of a model that embeds: batches within their limits, answers whole, nobody lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.engine.embedder import EmbeddingCore
from paceline_server.engine.fairness import CREDIT
from paceline_server.engine.interface import EmbeddingRequest
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeEncoder, fake_vector, model_info
from paceline_server.engine.window import DelayWindow


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make_core(*, batch=4, budget=20, delay=0.0, clock=None):
    encoder = FakeEncoder()
    limits = SchedulerLimits(batch, budget)
    core = EmbeddingCore(encoder, model_info(max_model_len=16), limits, DelayWindow(delay, batch), clock or Clock())
    return core, encoder


def run(core):
    answers = []
    while core.due_in() is not None:
        answers += core.step()
    return answers


@given(
    requests=st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=7), min_size=1, max_size=12),
    batch=st.integers(1, 6),
)
def test_every_request_gets_the_vectors_of_its_own_texts_in_their_order(requests, batch):
    core, encoder = make_core(batch=batch)
    inputs = {
        str(number): [[number * 10 + index] * length for index, length in enumerate(lengths)]
        for number, lengths in enumerate(requests)
    }
    for name, texts in inputs.items():
        assert core.submit(EmbeddingRequest(name, texts)) is None
    answers = run(core)
    assert {answer.request_id: answer.vectors for answer in answers} == {
        name: [fake_vector(text) for text in texts] for name, texts in inputs.items()
    }
    assert [answer.request_id for answer in answers] == list(inputs), "the first to come is the first to be answered"
    assert all(len(lengths) <= batch and sum(lengths) <= 20 for lengths in encoder.batches)
    assert core.stats().waiting == core.stats().running == core.stats().waiting_tokens == 0


@pytest.mark.parametrize(
    ("texts", "named"), [([[1] * 17], "reads 16"), ([], "at least one text"), ([[1], []], "at least one token")]
)
def test_a_request_that_can_never_be_served_is_refused_for_good(texts, named):
    core, _ = make_core()
    refusal = core.submit(EmbeddingRequest("a", texts))
    assert named in refusal.message
    assert refusal.retry_after is None
    assert core.due_in() is None


def test_a_text_of_more_than_the_token_budget_is_refused_by_the_settings_name():
    core, _ = make_core(budget=8)
    assert "max_tokens_in_batch" in core.submit(EmbeddingRequest("a", [[1] * 9])).message


def test_a_request_that_is_aborted_leaves_the_line_and_is_not_answered():
    core, encoder = make_core(batch=1)
    core.submit(EmbeddingRequest("gone", [[1], [2], [3]]))
    core.submit(EmbeddingRequest("stays", [[4]]))
    core.step()
    core.abort("gone")
    core.abort("gone")  # a second time is no error
    assert [answer.request_id for answer in run(core)] == ["stays"]
    assert len(encoder.batches) == 2


def test_a_request_whose_timeout_is_over_is_answered_without_vectors():
    clock = Clock()
    core, encoder = make_core(clock=clock)
    core.submit(EmbeddingRequest("late", [[1]], timeout=1.0))
    clock.now = 1.5
    [answer] = core.step()
    assert (answer.request_id, answer.vectors) == ("late", None)
    assert encoder.batches == []
    assert core.stats().expirations == 1


def test_busy_traffic_waits_for_company_and_a_full_batch_does_not():
    clock = Clock()
    core, encoder = make_core(batch=3, delay=0.5, clock=clock)
    core.submit(EmbeddingRequest("first", [[1]]))
    clock.now = 0.1
    core.submit(EmbeddingRequest("second", [[1]]))
    assert core.due_in() == pytest.approx(0.1)
    assert core.step() == []
    core.submit(EmbeddingRequest("third", [[1]]))
    assert core.due_in() == 0.0
    assert len(core.step()) == 3
    assert encoder.batches == [[1, 1, 1]]


def test_time_in_the_queue_ends_with_the_first_batch_of_a_request():
    clock = Clock()
    core, _ = make_core(batch=1, clock=clock)
    core.submit(EmbeddingRequest("a", [[1], [2]]))
    clock.now = 0.25
    core.step()
    clock.now = 0.75
    assert core.step()[0].queue_seconds == 0.25


def test_tenants_take_turns_by_weight_so_a_flood_of_texts_keeps_nobody_waiting():
    core, _ = make_core(batch=1)
    core.submit(EmbeddingRequest("flood", [[1] * 10] * 2000, tenant="loud"))
    for _ in range(600):
        core.step()
    for number in range(3):
        core.submit(EmbeddingRequest(str(number), [[2] * 10] * 4, tenant="quiet", weight=2.0))
    answered = [answer.request_id for _ in range(18) for answer in core.step()]
    assert answered == ["0", "1", "2"]
    assert core.stats().running == 1, "the flood goes on"


def test_while_both_wait_texts_are_computed_by_weight_and_who_was_idle_has_saved_up_no_more_than_a_burst():
    core, _ = make_core(batch=1)
    core.submit(EmbeddingRequest("early", [[1] * 16] * 3000, tenant="one"))
    for _ in range(1000):
        core.step()
    core.submit(EmbeddingRequest("late", [[2] * 16] * 3000, tenant="three", weight=3.0))
    for _ in range(1600):
        core.step()
    burst = 3 * CREDIT / 16
    assert abs(3000 - core._open["late"].missing - burst - 0.75 * (1600 - burst)) <= 3


def test_what_does_not_fit_a_batch_is_booked_to_nobody():
    core, encoder = make_core(budget=20)
    for name in "ab":
        core.submit(EmbeddingRequest(name, [[1] * 12] * 6, tenant=name))
    run(core)
    assert encoder.batches == [[12]] * 12


def test_a_tenant_of_no_weight_is_refused():
    assert "weight" in make_core()[0].submit(EmbeddingRequest("a", [[1]], weight=0.0)).message
