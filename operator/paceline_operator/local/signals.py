"""Ctrl-C and its like, counted. Used by `up`."""

from __future__ import annotations

import asyncio
import signal

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """SIGINT, SIGTERM and SIGHUP while a service is up: the first asks for the end, the second for a quick one."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    async def __aenter__(self) -> Signals:
        for number in _ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self._count)
        return self

    async def __aexit__(self, *_: object) -> None:
        for number in _ENDING:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
