"""The objects of local mode: what an API server would keep, in memory.

Everything in `local` reads objects here and waits here for changes. Objects are replaced, never changed in place, so
whoever holds one may keep it. One namespace, one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from paceline_operator.cluster import Manifest
from paceline_operator.conditions import timestamp
from paceline_operator.errors import StaleObservation

_KEPT_METADATA = ("uid", "creationTimestamp", "deletionTimestamp", "generation", "resourceVersion")


def labels_match(selector: Mapping[str, str], manifest: Manifest) -> bool:
    """Whether an object has all labels of the selector (matchLabels of Deployments, the selector of Services)."""
    labels = manifest["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in selector.items())


class Store:
    """Objects by kind and name."""

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._changed = asyncio.Event()
        self.version = 0  # rises with every change; the resourceVersion of the object that changed last

    def get(self, kind: str, name: str) -> Manifest | None:
        """The object, or None."""
        return self._objects.get((kind, name))

    def list(self, kind: str, selector: Mapping[str, str] | None = None) -> tuple[Manifest, ...]:
        """Objects of a kind that have the selector's labels, oldest first."""
        found = (manifest for (its_kind, _), manifest in self._objects.items() if its_kind == kind)
        return tuple(manifest for manifest in found if labels_match(selector or {}, manifest))

    async def wait_for_change(self, since: int) -> int:
        """Wait until the version is higher than `since`; returns it."""
        while self.version <= since:
            await self._changed.wait()
        return self.version

    def apply(self, manifest: Manifest, uid: str | None = None) -> Manifest:
        """Create the object, or replace all of it but its status and what the server keeps in its metadata.

        `spec.replicas` stays as it is where the manifest leaves it out: it then belongs to an autoscaler.

        Raises:
            StaleObservation: the object that is there is not the one with this uid (None: there should be none).
        """
        existing = self.get(manifest["kind"], manifest["metadata"]["name"])
        if (existing["metadata"]["uid"] if existing else None) != uid:
            raise StaleObservation(f"{manifest['kind']} {manifest['metadata']['name']} was replaced meanwhile")
        if existing is None:
            return self._put(manifest | {"metadata": manifest["metadata"] | self._new_metadata()})
        kept = {key: value for key, value in existing["metadata"].items() if key in _KEPT_METADATA}
        merged = manifest | {"metadata": manifest["metadata"] | kept}
        if "spec" in manifest and "replicas" in existing.get("spec", {}):
            merged["spec"] = {"replicas": existing["spec"]["replicas"]} | manifest["spec"]
        if "status" in existing:
            merged["status"] = existing["status"]
        if merged.get("spec") != existing.get("spec"):
            merged["metadata"]["generation"] = kept["generation"] + 1
        return existing if merged == existing else self._put(merged)

    def set_status(self, kind: str, name: str, status: Manifest) -> None:
        """Replace an object's status. An object that is gone is left alone."""
        existing = self.get(kind, name)
        if existing is not None and existing.get("status") != status:
            self._put(existing | {"status": status})

    def scale(self, kind: str, name: str, replicas: int) -> None:
        """Set `spec.replicas`, as the scale subresource does."""
        existing = self.get(kind, name)
        if existing is not None and existing["spec"].get("replicas") != replicas:
            metadata = existing["metadata"] | {"generation": existing["metadata"]["generation"] + 1}
            self._put(existing | {"metadata": metadata, "spec": existing["spec"] | {"replicas": replicas}})

    def mark_deleted(self, kind: str, name: str) -> None:
        """Begin a graceful deletion: whoever runs the object ends it and calls `remove`, by its deletionTimestamp."""
        existing = self.get(kind, name)
        if existing is not None and "deletionTimestamp" not in existing["metadata"]:
            grace = timedelta(seconds=existing.get("spec", {}).get("terminationGracePeriodSeconds", 0))
            metadata = existing["metadata"] | {"deletionTimestamp": timestamp(self._clock() + grace)}
            self._put(existing | {"metadata": metadata})

    def remove(self, kind: str, name: str) -> None:
        """Take an object away. What it owns (by ownerReferences) goes too: pods gracefully, the rest at once."""
        gone = self._objects.pop((kind, name), None)
        if gone is None:
            return
        self._announce()
        for (child_kind, child_name), child in list(self._objects.items()):
            if gone["metadata"]["uid"] in {owner["uid"] for owner in child["metadata"].get("ownerReferences", ())}:
                (self.mark_deleted if child_kind == "Pod" else self.remove)(child_kind, child_name)

    def touch(self) -> None:
        """Wake whoever waits, for a change that is in no object."""
        self._announce()

    def _new_metadata(self) -> Manifest:
        return {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp(self._clock()), "generation": 1}

    def _put(self, manifest: Manifest) -> Manifest:
        self._announce()
        stored = manifest | {"metadata": manifest["metadata"] | {"resourceVersion": str(self.version)}}
        self._objects[(manifest["kind"], manifest["metadata"]["name"])] = stored
        return stored

    def _announce(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()
