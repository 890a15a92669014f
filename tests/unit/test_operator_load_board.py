"""The board of loads: what the pods last reported, and whom a change concerns."""

from __future__ import annotations

from paceline_operator.adapter.errors import UnknownService
from paceline_operator.adapter.pressure import Pressure
from paceline_operator.cluster import Key, Load
from paceline_operator.load_board import LoadBoard

A, B = Key("default", "a"), Key("default", "b")


def pressure(depth: float, p95: float | None = None, measured_at: float | None = 1.0) -> Pressure:
    """What a meter says."""
    return Pressure(queue_depth=depth, ttft_p95=p95, ttft_pressure=0.0, missing=0, measured_at=measured_at)


class FakeMeter:
    """Says what the test tells it."""

    def __init__(self) -> None:
        self.pressures: dict[Key, Pressure] = {}

    async def refresh(self) -> None:
        """Nothing to ask."""

    async def pressure(self, key: Key) -> Pressure:
        """The load of this service."""
        if key not in self.pressures:
            raise UnknownService(str(key))
        return self.pressures[key]


async def test_only_services_whose_numbers_changed_are_named() -> None:
    """A service at rest causes no pass, and so no request."""
    meter, named = FakeMeter(), list[Key]()
    board = LoadBoard(meter)
    meter.pressures = {A: pressure(3, 0.5), B: pressure(0)}
    await board.refresh([A, B], named.append)
    assert sorted(named) == [A, B]
    named.clear()
    await board.refresh([A, B], named.append)
    assert named == []
    meter.pressures[A] = pressure(4, 0.5)
    await board.refresh([A, B], named.append)
    assert named == [A]
    assert board.read(A) == Load(queue_depth=4, ttft_p95=0.5)


async def test_what_was_not_measured_is_unknown_and_never_zero() -> None:
    """No pod answered, or nobody knows the service."""
    meter, named = FakeMeter(), list[Key]()
    board = LoadBoard(meter)
    meter.pressures = {A: pressure(0, measured_at=None)}
    await board.refresh([A, B], named.append)
    assert (board.read(A), board.read(B), named) == (Load(), Load(), [])
