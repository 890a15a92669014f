"""The adapter's seam to the API server: three calls on objects in their JSON form.

`kube` has the real one, tests fake it. Everything above decides on plain JSON, without knowing a Kubernetes client.
"""

from __future__ import annotations

from typing import Protocol

from paceline_operator.cluster import Manifest


class ObjectSource(Protocol):
    """Reads and patches objects by the path of their REST resource, such as /api/v1/namespaces/default/pods.

    Every call raises ClusterUnavailable when the API server does not answer, RequestRefused when it says no.
    """

    async def list_objects(self, path: str, label_selector: str | None = None) -> list[Manifest]:
        """List a collection from the API server's cache (resourceVersion=0)."""
        ...

    async def read_object(self, path: str) -> Manifest | None:
        """Read one object, None when it does not exist."""
        ...

    async def patch_object(self, path: str, patch: Manifest) -> Manifest | None:
        """JSON-merge-patch one object and return it, None when it does not exist.

        A `metadata.resourceVersion` in the patch makes it conditional. Raises StaleObservation when that is not the
        object's version any more.
        """
        ...
