"""The full re-list, and the pulse that the liveness probe feels."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline_operator.cluster import Key, Manifest
from paceline_operator.errors import ClusterUnavailable
from paceline_operator.resync import Resync

INTERVAL = 300.0


class Api:
    """An API server with some services, and a clock that only `sleep` moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.services = [Key("a", "one"), Key("b", "two")]
        self.paths: list[str] = []
        self.away = False
        self.sleeps = 0
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def list_objects(self, path: str, *, fresh: bool) -> list[Manifest]:
        """The services, as they are now."""
        assert fresh
        self.paths.append(path)
        if self.away:
            raise ClusterUnavailable("away")
        return [{"metadata": {"namespace": key.namespace, "name": key.name}} for key in self.services]

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps -= 1
        if self.sleeps <= 0:
            raise asyncio.CancelledError

    async def run(self, resync: Resync, *, known: tuple[Key, ...] = (), sleeps: int = 1) -> list[Key]:
        """Let it list this often; returns the keys it named."""
        named: list[Key] = []
        self.sleeps = sleeps
        with pytest.raises(asyncio.CancelledError):
            await resync.run(named.append, lambda: known)
        return named


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    """An API server that answers."""
    return Api(monkeypatch)


def resync_of(api: Any, *namespaces: str) -> Resync:
    """A re-list on the test's clock."""
    return Resync(api, namespaces, INTERVAL, clock=lambda: api.now)


async def test_every_service_is_named_and_so_is_one_that_has_gone(api: Api) -> None:
    """A deletion that no event told of is noticed too."""
    gone = Key("c", "gone")
    assert await api.run(resync_of(api), known=(gone, api.services[0])) == [*api.services, gone]
    assert api.paths == ["/apis/paceline.dev/v1alpha1/llmservices"]


async def test_chosen_namespaces_are_listed_one_by_one(api: Api) -> None:
    """An operator of two namespaces needs no right on the others."""
    await api.run(resync_of(api, "a", "b"))
    assert [path.split("/")[5] for path in api.paths] == ["a", "b"]


async def test_the_pulse_stops_when_lists_fail_for_long(api: Api) -> None:
    """Not at the first failure, and it beats again with the first success."""
    resync = resync_of(api)
    await api.run(resync)
    api.away = True
    await api.run(resync, sleeps=3)
    assert not resync.stale
    api.now += 3 * INTERVAL
    assert resync.stale
    api.away = False
    await api.run(resync)
    assert not resync.stale


async def test_a_standby_that_lists_nothing_is_not_stale(api: Api) -> None:
    """Waiting for the lease for a week is no reason to be restarted."""
    resync = resync_of(api)
    api.now += 7 * 86400
    assert not resync.stale
