"""The objects of local mode are kept as an API server would keep them."""

from __future__ import annotations

from paceline_operator.local.store import Store
from paceline_operator.testing import NOW


def test_a_deleted_pod_carries_the_moment_by_which_it_has_ended() -> None:
    """As in Kubernetes: by that moment the reconciler tells a pod that drains from one that hangs."""
    store = Store(lambda: NOW)
    store.apply({"kind": "Pod", "metadata": {"name": "a"}, "spec": {"terminationGracePeriodSeconds": 75}})
    store.mark_deleted("Pod", "a")
    pod = store.get("Pod", "a")
    assert pod is not None
    assert pod["metadata"]["deletionTimestamp"] == "2026-01-02T03:05:20Z"
