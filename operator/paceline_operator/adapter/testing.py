"""For tests: a fake of the adapter's seam, objects in a dictionary with the API server's rules that matter here.

And TLS handshakes without a socket.
"""

from __future__ import annotations

import copy
import ssl
from collections.abc import Iterable
from typing import Any

from paceline_operator.cluster import Manifest
from paceline_operator.errors import ClusterUnavailable, StaleObservation


class FakeObjects:
    """An ObjectSource that keeps single objects and collections by path.

    `down` makes every call raise ClusterUnavailable, `refused` counts those. `patches` are the accepted ones, in order.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Manifest] = {}
        self.collections: dict[str, list[Manifest]] = {}
        self.patches: list[tuple[str, Manifest]] = []
        self.down = False
        self.refused = 0

    def put(self, path: str, manifest: Manifest) -> None:
        """Create or replace an object; its version starts at 1."""
        stored = copy.deepcopy(manifest)
        stored.setdefault("metadata", {})["resourceVersion"] = "1"
        self.objects[path] = stored

    async def list_objects(self, path: str, label_selector: str | None = None) -> list[Manifest]:
        """Return the collection's objects that carry the labels of a selector of the form a=b,c=d."""
        self._check()
        wanted = dict(pair.split("=") for pair in label_selector.split(",")) if label_selector else {}
        return [copy.deepcopy(item) for item in self.collections.get(path, ()) if _carries(item, wanted.items())]

    async def read_object(self, path: str) -> Manifest | None:
        """Return a copy of the object."""
        self._check()
        return copy.deepcopy(self.objects.get(path))

    async def patch_object(self, path: str, patch: Manifest) -> Manifest | None:
        """Merge the patch in, when its version is the object's."""
        self._check()
        stored = self.objects.get(path)
        if stored is None:
            return None
        version = patch.get("metadata", {}).get("resourceVersion", stored["metadata"]["resourceVersion"])
        if version != stored["metadata"]["resourceVersion"]:
            raise StaleObservation(path)
        _merge(stored, patch)
        stored["metadata"]["resourceVersion"] = str(int(version) + 1)
        self.patches.append((path, patch))
        return copy.deepcopy(stored)

    def _check(self) -> None:
        if self.down:
            self.refused += 1
            raise ClusterUnavailable("the API server is down")


def _carries(item: Manifest, wanted: Iterable[tuple[str, str]]) -> bool:
    labels = item["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in wanted)


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            if not isinstance(target.get(key), dict):
                target[key] = {}
            _merge(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> ssl.SSLObject:
    """Do a TLS handshake in memory, with a client that asks for `host`. The server's end is returned.

    Raises:
        ssl.SSLError: one of the two refuses the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=host)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (asking, answering):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return answering
