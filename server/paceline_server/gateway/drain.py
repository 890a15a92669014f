"""The end of a server's life: refuse what comes, let run what runs, up to a deadline. For `reception` and `serve`.

SIGTERM and POST /drain both begin it. Work counts from a request's head until its answer is with the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline_server.errors import Draining

_RETRY_AFTER_SECONDS = 1.0  # another replica can take it at once


class Drain:
    """Counts the work under way and ends it.

    Args:
        seconds: how long running work may take after `begin`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline: float | None = None
        self._by_request = False
        self._running: set[asyncio.Timeout] = set()
        self._finished = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether new work is refused."""
        return self._deadline is not None

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self._running)

    @property
    def by_request(self) -> bool:
        """Whether POST /drain began it."""
        return self._by_request

    def begin(self, *, by_request: bool = False) -> None:
        """Take nothing new from now on; a second call changes nothing."""
        if self._deadline is None:
            self._by_request = by_request
            self._set_deadline(self._seconds)

    def hurry(self) -> None:
        """End what still runs now."""
        self._set_deadline(0.0)

    async def finished(self) -> None:
        """Return when draining has begun and no work is left."""
        await self._finished.wait()

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Hold the server open for a piece of work.

        Raises:
            Draining: on entry, where draining has begun; later, where the deadline passes.
        """
        if self.begun:
            raise Draining("the server is shutting down; send the request again", retry_after=_RETRY_AFTER_SECONDS)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._running.add(scope)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise Draining("the server shuts down and could not wait for the rest of this answer") from None
        finally:
            self._running.discard(scope)
            self._note_finish()

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + seconds
        for scope in self._running:
            if not scope.expired():
                scope.reschedule(self._deadline)
        self._note_finish()

    def _note_finish(self) -> None:
        if self.begun and not self._running:
            self._finished.set()
