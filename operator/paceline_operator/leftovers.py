"""Children of ours that nothing needs any more. Pure; called by `reconcile` for every plan.

A ConfigMap of an earlier configuration stays as long as a pod may mount it: one that runs, or one that a ReplicaSet
would make in place of one that is lost, which happens in the middle of a rollout that does not get on. So there are
never more of them than there are templates with pods, and one. The fixed name that all configurations of a service
shared once (0.1) is a name like any other here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline_operator.cluster import Delete, Manifest, Observed
from paceline_operator.ownership import identity, is_alive, is_ours
from paceline_operator.pods import has_ended


def find_leftovers(uid: str, desired: Iterable[Manifest], observed: Observed) -> tuple[Delete, ...]:
    """What to delete of the children of the service with this uid, beside which `desired` are those it should have."""
    wanted = {identity(child) for child in desired}
    mounted = {("ConfigMap", name) for name in _mounted_config_maps(observed)}
    return tuple(
        Delete(child["apiVersion"], *identity(child), child["metadata"]["uid"])
        for child in observed.children
        if identity(child) not in wanted | mounted and is_alive(child) and is_ours(child, uid)
    )


def _mounted_config_maps(observed: Observed) -> Iterator[str]:
    """Of all pods that have not ended, those on their way out too, and of templates that more pods may be made from."""
    templates = (one["spec"]["template"] for one in observed.replica_sets if one["spec"].get("replicas", 1))
    for pod in (*(pod for pod in observed.pods if not has_ended(pod)), *templates):
        for volume in pod["spec"].get("volumes", ()):
            if "configMap" in volume:
                yield volume["configMap"]["name"]
