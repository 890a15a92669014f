"""The first of several coroutines to end, for whoever waits for one of two things. Used by `runner` and `front`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def first_of(*coroutines: Coroutine[Any, Any, T]) -> T:
    """Run them together; return (or raise) what the first one to end does, after the others have been cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def forever() -> NoReturn:
    """Wait until cancelled."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")
