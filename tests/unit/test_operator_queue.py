"""The keyed queue and its workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from paceline_operator.cluster import Key
from paceline_operator.errors import ClusterUnavailable, StaleObservation
from paceline_operator.queue import KeyedQueue, Worker

A, B = Key("default", "a"), Key("default", "b")


@asynccontextmanager
async def running(worker: Worker, workers: int = 2) -> AsyncIterator[None]:
    """A worker that runs while the context lasts."""
    task = asyncio.create_task(worker.run(workers))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Passes:
    """Records passes; each waits until the test lets it go on."""

    def __init__(self, results: list[float | Exception | None] | None = None) -> None:
        self.started: list[Key] = []
        self.active: list[Key] = []
        self.overlapped = False
        self.gate = asyncio.Event()
        self._changed = asyncio.Condition()
        self._results = results or []

    async def __call__(self, key: Key) -> float | None:
        """One pass."""
        self.overlapped |= key in self.active
        self.started.append(key)
        self.active.append(key)
        async with self._changed:
            self._changed.notify_all()
        await self.gate.wait()
        self.active.remove(key)
        result = self._results.pop(0) if self._results else None
        if isinstance(result, Exception):
            raise result
        return result

    async def until(self, condition: Callable[[list[Key]], bool]) -> None:
        """Wait until the started passes fulfil a condition."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: condition(self.started)), 60)


async def test_a_key_waits_once_however_often_it_is_named() -> None:
    """And keys are taken in the order in which they were first named."""
    queue = KeyedQueue()
    for key in (B, A, B, B):
        queue.add(key)
    assert [await queue.take(), await queue.take()] == [B, A]
    assert not queue._due


async def test_a_key_is_never_worked_on_twice_at_once_and_no_naming_is_lost() -> None:
    """Named twice during its pass, it has exactly one more pass afterwards, whatever the number of workers."""
    queue, passes = KeyedQueue(rest_seconds=0), Passes()
    async with running(Worker(queue, passes), workers=4):
        queue.add(A)
        await passes.until(lambda started: started == [A])
        queue.add(A)
        queue.add(A)
        queue.add(B)
        await passes.until(lambda started: started == [A, B])
        passes.gate.set()
        await passes.until(lambda started: started == [A, B, A])
        await asyncio.sleep(0.01)
    assert passes.started == [A, B, A]
    assert not passes.overlapped


async def test_a_burst_of_events_becomes_one_pass() -> None:
    """A key rests after its pass; what happens meanwhile is seen by the next."""
    queue, passes = KeyedQueue(rest_seconds=0.05), Passes()
    passes.gate.set()
    async with running(Worker(queue, passes)):
        queue.add(A)
        await passes.until(lambda started: started == [A])
        for _ in range(20):
            queue.add(A)
            await asyncio.sleep(0)
        await passes.until(lambda started: started == [A, A])
        await asyncio.sleep(0.1)
    assert passes.started == [A, A]


async def test_a_pass_can_ask_to_be_repeated_later() -> None:
    """The delay it returns; an event in between makes it earlier."""
    queue, passes = KeyedQueue(rest_seconds=0), Passes([60.0, 0.01])
    passes.gate.set()
    async with running(Worker(queue, passes)):
        queue.add(A)
        await passes.until(lambda started: len(started) == 1)
        queue.add(A)
        await passes.until(lambda started: len(started) == 3)


async def test_an_earlier_date_is_not_put_off_by_a_later_one() -> None:
    """Whoever asks for the sooner look gets it."""
    queue = KeyedQueue()
    queue.add_after(A, 0.01)
    queue.add_after(A, 60)
    assert await asyncio.wait_for(queue.take(), 60) == A


async def test_what_is_stale_once_is_no_news_and_what_stays_so_is(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody who changes an object in between is nothing to report; a pass that never gets through is."""
    queue, passes = KeyedQueue(rest_seconds=0), Passes([StaleObservation("configmap is another one")] * 7)
    passes.gate.set()
    async with running(Worker(queue, passes), workers=1):
        for number in range(1, 9):
            queue.add(A)
            await passes.until(lambda started, number=number: len(started) >= number)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_a_failed_pass_is_repeated_and_disturbs_no_other_key() -> None:
    """Our own error and one that nobody expected alike."""
    queue = KeyedQueue(rest_seconds=0)
    passes = Passes([ClusterUnavailable("away"), ValueError("a bug"), None])
    passes.gate.set()
    async with running(Worker(queue, passes), workers=1):
        queue.add(A)
        queue.add(B)
        await passes.until(lambda started: len(started) == 4)
    assert sorted(passes.started) == [A, A, B, B]
