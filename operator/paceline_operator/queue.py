"""A queue of keys: a service waits once however often it is named, and is never worked on twice at the same time.

After each pass a key rests for a moment: a burst of events becomes one pass, and a quarrel with another controller over
a field stays slow.

Filled by `handlers` and `resync`, emptied by workers that call `reconcile`. What fails is repeated, with back-off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from paceline_operator import metrics
from paceline_operator.cluster import Key
from paceline_operator.errors import PacelineError, StaleObservation

logger = logging.getLogger(__name__)

REST_SECONDS: Final = 0.2
_FIRST_DELAY: Final = 0.2  # seconds
_LONGEST_DELAY: Final = 60.0  # seconds
_DOUBLINGS: Final = 10  # enough to reach the longest delay
_LASTING_DELAY: Final = 10.0  # seconds: what was stale so often in a row is stuck


class KeyedQueue:
    """Keys that are due, keys that are being worked on or rest, and keys that become due later."""

    def __init__(self, rest_seconds: float = REST_SECONDS) -> None:
        self._rest_seconds = rest_seconds
        self._due: dict[Key, None] = {}  # in the order of arrival
        self._busy: set[Key] = set()  # being worked on, or resting
        self._again: set[Key] = set()  # named while busy: due again as soon as they are not
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._filled = asyncio.Event()

    def add(self, key: Key) -> None:
        """Make a key due now."""
        self._cancel_timer(key)
        if key in self._busy:
            self._again.add(key)
            return
        self._due[key] = None
        metrics.QUEUE_LENGTH.set(len(self._due))
        self._filled.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Make a key due in some seconds, unless it is due earlier anyway."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if key in self._due or (timer and timer.when() <= loop.time() + seconds):
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_later(seconds, self.add, key)

    async def take(self) -> Key:
        """Wait for a due key and take it. `done` has to follow."""
        while not self._due:
            self._filled.clear()
            await self._filled.wait()
        key = next(iter(self._due))
        del self._due[key]
        self._busy.add(key)
        metrics.QUEUE_LENGTH.set(len(self._due))
        return key

    def done(self, key: Key) -> None:
        """Say that work on a key has ended; it rests now."""
        asyncio.get_running_loop().call_later(self._rest_seconds, self._rested, key)

    def _rested(self, key: Key) -> None:
        self._busy.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _cancel_timer(self, key: Key) -> None:
        if timer := self._timers.pop(key, None):
            timer.cancel()


class Worker:
    """Takes keys and processes them one after the other; several workers share a queue and its failures."""

    def __init__(self, queue: KeyedQueue, process: Callable[[Key], Awaitable[float | None]]) -> None:
        self._queue = queue
        self._process = process
        self._failures: dict[Key, int] = {}

    async def run(self, workers: int) -> None:
        """Process keys for ever, `workers` at the same time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            try:
                delay = await self._attempt(key)
            finally:
                self._queue.done(key)
            if delay is not None:
                self._queue.add_after(key, delay)

    async def _attempt(self, key: Key) -> float | None:
        """One pass. Returns when to repeat it; whatever went wrong concerns this key alone and is repeated later."""
        try:
            with metrics.RECONCILE_SECONDS.time():
                delay: float | None = await self._process(key)
        except Exception as error:
            metrics.RECONCILE_ERRORS.labels(type(error).__name__).inc()
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = min(_FIRST_DELAY * 2 ** min(failures - 1, _DOUBLINGS), _LONGEST_DELAY)
            _log(key, error, delay)
            return delay
        self._failures.pop(key, None)
        return delay


def _log(key: Key, error: Exception, delay: float) -> None:
    if isinstance(error, StaleObservation) and delay < _LASTING_DELAY:
        logger.debug("%s: %s; again in %.1f s", key, error, delay)
    elif isinstance(error, PacelineError):
        logger.warning("%s: %s; again in %.1f s", key, error, delay)
    else:
        logger.error("%s: unexpected error; again in %.1f s", key, delay, exc_info=error)
