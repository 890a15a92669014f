"""The lease that lets one of several operators act: held by one, renewed by it, taken over when it falls silent.

Used by `run` around everything that writes. Nobody's clock is trusted but one's own: another holder is silent when *we*
have seen no renewal for the lease's duration, as in Kubernetes' own leader election.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from paceline_operator.cluster import Manifest
from paceline_operator.errors import ClusterUnavailable, LeaseLost, PacelineError, RequestRefused, StaleObservation
from paceline_operator.kube import KubeClient

logger = logging.getLogger(__name__)

# Parts of the lease's duration. After a third it is renewed; a request that hangs is given up after a sixth and
# repeated; at two thirds we give up, so that even a request that hangs just then ends before others may take us for
# silent.
_RENEW: Final = 1 / 3
_GIVE_UP_REQUEST: Final = 1 / 6
_REPEAT: Final = 1 / 12
_GIVE_UP: Final = 2 / 3


@dataclass(frozen=True, slots=True)
class _Sighting:
    """A renewal by somebody, and when we first saw it on our clock."""

    holder: str
    renewed: str  # renewTime as written, compared but never read as a time
    seen: float


class Lease:
    """One Lease object, seen by one candidate.

    client: for the lease alone, so that its renewal neither waits for the connections of other work nor tries one after
    the other of them where all were cut without a word.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._metadata = {"name": name, "namespace": namespace}
        self._identity = identity
        self._seconds = seconds
        self._clock = clock
        self._sighting = _Sighting("", "", 0.0)
        self._renewed = 0.0

    @property
    def _path(self) -> str:
        return f"{self._collection}/{self._metadata['name']}"

    async def acquire(self) -> None:
        """Wait until the lease is ours."""
        while True:
            if await self._try():
                break
            await asyncio.sleep(self._seconds * _GIVE_UP_REQUEST)
        logger.info("lease %s acquired by %s", self._metadata["name"], self._identity)

    async def keep(self) -> None:
        """Renew for ever. Raises LeaseLost when somebody else has it, or before others may take ours for silent."""
        pause = _RENEW
        while True:
            await asyncio.sleep(self._seconds * pause)
            pause = _RENEW if await self._try() else _REPEAT
            if self._sighting.holder != self._identity:
                raise LeaseLost(f"the lease was taken by {self._sighting.holder}")
            if self._clock() - self._renewed > self._seconds * _GIVE_UP:
                raise LeaseLost(f"the lease could not be renewed for {self._clock() - self._renewed:.0f} s")

    async def release(self) -> None:
        """Let the next candidate have it at once. Never raises: without it they wait for the lease's duration."""
        try:
            async with asyncio.timeout(self._seconds * _GIVE_UP_REQUEST):
                lease = await self._client.read_object(self._path)
                if lease and _holder(lease) == self._identity:
                    await self._write(lease, holder="")
        except (PacelineError, TimeoutError) as error:
            logger.warning("lease not released: %r", error)

    async def _try(self) -> bool:
        """Take or renew the lease if it is ours, free or silent. False when it is not, we may not, or cannot tell."""
        started = self._clock()
        try:
            async with asyncio.timeout(self._seconds * _GIVE_UP_REQUEST):
                lease = await self._client.read_object(self._path)
                if lease and not self._may_take(lease):
                    return False
                await self._write(lease, self._identity)
        except StaleObservation:
            return False
        except RequestRefused as error:
            logger.error("lease %s refused (%d): %s; grant get, create and update", self._path, error.status, error)
            return False
        except (ClusterUnavailable, TimeoutError) as error:
            logger.warning("lease not reached: %r", error)
            return False
        # From before the request: it may have been written long before we heard of it.
        self._renewed = started
        self._sighting = _Sighting(self._identity, "", started)
        return True

    def _may_take(self, lease: Manifest) -> bool:
        spec = _spec(lease)
        holder, renewed = _holder(lease), spec.get("renewTime") or ""
        if (holder, renewed) != (self._sighting.holder, self._sighting.renewed):
            self._sighting = _Sighting(holder, renewed, self._clock())
        duration = spec.get("leaseDurationSeconds") or self._seconds
        silent = self._clock() - self._sighting.seen > duration
        return holder in ("", self._identity) or silent

    async def _write(self, lease: Manifest | None, holder: str) -> None:
        """Write the lease on condition that it has not changed since it was read."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        previous = _spec(lease) if lease else {}
        took_over = _holder(lease) != holder if lease else True
        spec = {
            **previous,
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._seconds)),
            "acquireTime": now if took_over else previous.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": previous.get("leaseTransitions", 0) + (1 if lease and took_over and holder else 0),
        }
        manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": self._metadata, "spec": spec}
        if lease is None:
            await self._client.create_object(self._collection, manifest)
        else:
            await self._client.replace_object(self._path, {**manifest, "metadata": lease["metadata"]})


def _spec(lease: Manifest) -> dict[str, Any]:
    """The lease's spec; the chart makes the object without one."""
    return lease.get("spec") or {}


def _holder(lease: Manifest) -> str:
    return str(_spec(lease).get("holderIdentity") or "")
