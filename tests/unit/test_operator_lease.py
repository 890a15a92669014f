"""The lease between operators, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from paceline_operator.cluster import Manifest
from paceline_operator.errors import ClusterUnavailable, LeaseLost, RequestRefused, StaleObservation
from paceline_operator.lease import Lease

SECONDS = 15.0


class FakeLeases:
    """The lease's collection of an API server, with its optimistic locking."""

    def __init__(self, lease: Manifest | None = None) -> None:
        self.lease = lease
        self.away = False
        self.forbidden = False
        self.hangs = False
        self._version = 0

    @property
    def spec(self) -> dict[str, Any]:
        """What is stored."""
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec

    async def read_object(self, path: str) -> Manifest | None:
        """The stored lease."""
        if self.away:
            raise ClusterUnavailable("away")
        if self.forbidden:
            raise RequestRefused(403, "User operator cannot get resource leases")
        if self.hangs:
            await asyncio.Event().wait()
        return copy.deepcopy(self.lease)

    async def create_object(self, path: str, manifest: Manifest) -> Manifest:
        """Store a new one."""
        if self.lease is not None:
            raise StaleObservation("exists")
        return self._store(manifest)

    async def replace_object(self, path: str, manifest: Manifest) -> Manifest:
        """Store another version of the one that was read."""
        assert self.lease is not None
        if manifest["metadata"].get("resourceVersion") != self.lease["metadata"].get("resourceVersion"):
            raise StaleObservation("changed")
        return self._store(manifest)

    def _store(self, manifest: Manifest) -> Manifest:
        self._version += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self._version)
        return self.lease


class Candidate:
    """One operator with its own clock, which the others do not share."""

    def __init__(self, leases: FakeLeases, identity: str) -> None:
        self.now = 1000.0 * len(identity)
        self.lease = Lease(leases, "ns", "lease", identity, seconds=SECONDS, clock=lambda: self.now)

    async def tries(self) -> bool:
        """One attempt to take or renew."""
        return await self.lease._try()


@pytest.fixture
def leases() -> FakeLeases:
    """No lease yet."""
    return FakeLeases()


async def test_the_first_takes_it_and_the_second_does_not(leases: FakeLeases) -> None:
    """While the first renews, time alone does not help the second."""
    one, other = Candidate(leases, "one"), Candidate(leases, "other")
    assert await one.tries()
    assert leases.spec["holderIdentity"] == "one"
    for _ in range(10):
        assert not await other.tries()
        other.now += SECONDS / 2
        assert await one.tries()


async def test_a_silent_holder_is_followed_after_the_leases_duration(leases: FakeLeases) -> None:
    """Measured on the follower's own clock, from when it first saw the last renewal."""
    one, other = Candidate(leases, "one"), Candidate(leases, "other")
    await one.tries()
    assert not await other.tries()
    other.now += SECONDS - 1
    assert not await other.tries()
    other.now += 2
    assert await other.tries()
    assert (leases.spec["holderIdentity"], leases.spec["leaseTransitions"]) == ("other", 1)
    assert not await one.tries()


async def test_a_released_lease_is_free_at_once(leases: FakeLeases) -> None:
    """An upgrade does not wait."""
    one, other = Candidate(leases, "one"), Candidate(leases, "other")
    await one.tries()
    await one.lease.release()
    assert await other.tries()


async def test_somebody_elses_lease_is_not_released(leases: FakeLeases) -> None:
    """A process that ends because it lost the lease must not free it for a third."""
    one, other = Candidate(leases, "one"), Candidate(leases, "other")
    await one.tries()
    await other.lease.release()
    assert leases.spec["holderIdentity"] == "one"


async def test_an_empty_lease_of_the_chart_is_taken() -> None:
    """The chart makes the object, so that it goes with the release."""
    leases = FakeLeases({"metadata": {"name": "lease", "namespace": "ns"}})
    assert await Candidate(leases, "one").tries()
    assert leases.spec["holderIdentity"] == "one"


async def test_a_lease_that_was_deleted_is_made_again(leases: FakeLeases) -> None:
    """By the next that wants it, its holder before all."""
    one = Candidate(leases, "one")
    await one.tries()
    leases.lease = None
    assert await one.tries()
    assert leases.spec["holderIdentity"] == "one"


async def test_a_lease_that_we_may_not_have_is_said_with_the_rights_that_are_missing(
    leases: FakeLeases, caplog: pytest.LogCaptureFixture
) -> None:
    """And tried again, since rights come too: an operator that ends instead is restarted to no avail."""
    leases.forbidden = True
    one = Candidate(leases, "one")
    assert not await one.tries()
    assert "cannot get resource leases; grant get, create and update" in caplog.text
    leases.forbidden = False
    assert await one.tries()


async def test_of_two_that_write_at_the_same_time_one_wins(leases: FakeLeases) -> None:
    """By the object's version, not by who asked first."""
    one, other = Candidate(leases, "one"), Candidate(leases, "other")
    await one.tries()
    await one.lease.release()
    assert sorted(await asyncio.gather(one.tries(), other.tries())) in ([False, True], [True, True])
    assert [await one.tries(), await other.tries()].count(True) == 1


async def test_keeping_ends_when_somebody_else_has_it(leases: FakeLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next renewal."""
    one = Candidate(leases, "one")
    await one.tries()
    leases.spec["holderIdentity"] = "other"
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pass_time(one, seconds))
    with pytest.raises(LeaseLost, match="taken by other"):
        await one.lease.keep()


async def test_keeping_ends_before_others_may_take_us_for_silent(
    leases: FakeLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that is cut off stops acting while the lease is still its own."""
    one = Candidate(leases, "one")
    await one.tries()
    renewed = one.now
    leases.away = True
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pass_time(one, seconds))
    with pytest.raises(LeaseLost, match="could not be renewed"):
        await one.lease.keep()
    assert one.now - renewed <= SECONDS


async def test_a_request_that_hangs_does_not_keep_us_acting(leases: FakeLeases) -> None:
    """A connection that was cut without a word: given up in time, on the real clock."""
    lease = Lease(leases, "ns", "lease", "one", seconds=0.5)
    await lease.acquire()
    leases.hangs = True
    with pytest.raises(LeaseLost, match="could not be renewed"):
        async with asyncio.timeout(0.5):
            await lease.keep()


async def test_one_request_that_hangs_loses_nothing(leases: FakeLeases) -> None:
    """The next one goes over a new connection."""
    lease = Lease(leases, "ns", "lease", "one", seconds=0.5)
    await lease.acquire()
    leases.hangs = True
    keeping = asyncio.create_task(lease.keep())
    await asyncio.sleep(0.2)
    leases.hangs = False
    done, _ = await asyncio.wait({keeping}, timeout=0.6)
    assert not done
    keeping.cancel()


async def pass_time(candidate: Candidate, seconds: float) -> None:
    """Sleep on the candidate's clock."""
    candidate.now += seconds
