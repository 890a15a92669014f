"""One pass over one service: observe ▸ desired ▸ plan ▸ execute ▸ status. Pure except at its two ends.

Called by the queue of `handlers` for a cluster and by `local` for this machine, with whatever `Cluster` they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from paceline_operator import conditions, names
from paceline_operator.cluster import Action, Apply, Cluster, Key, Manifest, Observed, PatchStatus, Plan
from paceline_operator.desired import Desired, render
from paceline_operator.drift import differs
from paceline_operator.errors import ChildRefused, InvalidSpec
from paceline_operator.failure import Failure, forbidden
from paceline_operator.failures import is_waiting_silently
from paceline_operator.leftovers import find_leftovers
from paceline_operator.ownership import identity, is_alive, is_of_namesake, is_ours
from paceline_operator.spec import LLMService, parse_service
from paceline_operator.status import Situation, assess, compute_conditions, render_status

# What a refused child or a forbidden look waits for (a quota, a right), or somebody else's object that has its name,
# comes and goes without an event about our objects.
REFUSED_RETRY_SECONDS: Final = 20.0
_RETRIED: Final = (conditions.NAME_CONFLICT, conditions.FORBIDDEN)
# A pod that does not leave in time tells nothing of it.
LEAVING_PODS_SECONDS: Final = 20.0
# A pod that waits silently changes no status when a warning about it appears.
SILENT_PODS_SECONDS: Final = 10.0


async def reconcile(
    cluster: Cluster, key: Key, server_image: str, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> float | None:
    """Bring the service one step closer to its specification and say in its status how far it is.

    Returns after how many seconds to look again although nothing may happen, None when events will tell.
    Raises StaleObservation and ClusterUnavailable: look again, soon or later.
    """
    observed = await cluster.observe(key)
    plan = decide(observed, server_image, clock())
    try:
        await cluster.execute(key, plan)
    except ChildRefused as refusal:
        await cluster.execute(key, explain(await cluster.observe(key), clock(), refusal))
        return REFUSED_RETRY_SECONDS
    return plan.requeue_after


def decide(observed: Observed, server_image: str, now: datetime) -> Plan:
    """What to do about what was observed. Nothing at all for a service that is gone or on its way out."""
    if observed.service is None or not is_alive(observed.service):
        return Plan()
    if blindness := _blindness(observed):
        return _report(observed, _last_revision(observed), now, blindness)
    try:
        service = parse_service(observed.service)
    except InvalidSpec as error:
        return _report(observed, _last_revision(observed), now, Failure(conditions.INVALID_SPEC, str(error)))
    desired = render(service, choose_image(service, server_image, _deployment(observed)))
    if blocker := _foreign_child(service, desired, observed):
        return _report(observed, _last_revision(observed), now, blocker)
    held = _child_on_its_way_out(desired, observed)
    return _report(observed, desired.revision, now, held, _changes(service, desired, observed))


def explain(observed: Observed, now: datetime, refusal: ChildRefused) -> Plan:
    """The status of a service of which a child was refused, observed after that: earlier children have been applied."""
    if observed.service is None or not is_alive(observed.service):
        return Plan()
    return _report(observed, _last_revision(observed), now, Failure(conditions.CHILD_REFUSED, str(refusal)))


def choose_image(service: LLMService, default_image: str, deployment: Manifest | None) -> str:
    """The server image: the user's; else the one that runs, while nothing but the operator's default has changed.

    So an upgrade of the operator alone rolls no pods. Whatever else makes a new revision takes the new default with it.
    """
    if service.spec.image:
        return service.spec.image
    metadata = (deployment or {}).get("metadata", {})
    running_image = metadata.get("annotations", {}).get(names.ANNOTATION_SERVER_IMAGE)
    if deployment is None or running_image in (None, default_image):
        return default_image
    unchanged = render(service, running_image).revision == _template_labels(deployment).get(names.LABEL_REVISION)
    return str(running_image) if unchanged else default_image


def _report(
    observed: Observed, revision: str, now: datetime, blocker: Failure | None, changes: tuple[Action, ...] = ()
) -> Plan:
    """The plan of `changes`, then the status if it is another one, then its events."""
    assert observed.service is not None
    metadata = observed.service["metadata"]
    stored = observed.service.get("status", {})
    situation = assess(observed, revision, blocker, now)
    fresh = compute_conditions(situation)
    status = render_status(observed.service, situation, fresh, observed.load, now)
    news: tuple[Action, ...] = ()
    if status != stored:
        events = conditions.transition_events(metadata["uid"], stored.get("conditions", ()), fresh)
        news = (PatchStatus(metadata["uid"], status, metadata.get("resourceVersion")), *events)
    return Plan((*changes, *news), _look_again_after(situation))


def _look_again_after(situation: Situation) -> float | None:
    """Seconds, where what the service waits for comes without an event."""
    if any(is_waiting_silently(pod) for pod in situation.census.active):
        return SILENT_PODS_SECONDS
    if situation.failure and situation.failure.reason in _RETRIED:
        return REFUSED_RETRY_SECONDS
    return LEAVING_PODS_SECONDS if situation.census.leaving else None


def _blindness(observed: Observed) -> Failure | None:
    """What may not be read of that on which decisions rest: a child that is not seen may be there, and be mounted.

    In an order of its own: answers come in any, and each other text would be another status to write.
    """
    refusals = [words for resource, words in sorted(observed.unseen.items()) if resource != "events"]
    return forbidden(refusals) if refusals else None


def _changes(service: LLMService, desired: Desired, observed: Observed) -> tuple[Action, ...]:
    """Children to apply because they are missing or differ, and those to delete because nothing needs them any more."""
    actions: list[Action] = []
    for child in desired.children:
        live = _live(observed, child)
        if live is None:
            actions.append(Apply(child))
        elif is_alive(live) and differs(live, child):
            actions.append(Apply(child, live["metadata"]["uid"]))
    return (*actions, *find_leftovers(service.uid, desired.children, observed))


def _foreign_child(service: LLMService, desired: Desired, observed: Observed) -> Failure | None:
    """An object of a child's name that is not ours. It is neither adopted nor overwritten, and no half set is made."""
    for child in desired.children:
        live = _live(observed, child)
        if live is None or is_ours(live, service.uid):
            continue
        what = f"{live['kind']} {live['metadata']['name']}"
        if is_of_namesake(live, service.name):
            message = f"{what} of a deleted LLMService of this name is still being removed"
            return Failure(conditions.WAITING_FOR_GARBAGE_COLLECTION, message)
        message = f"{what} exists and does not belong to this LLMService; delete or rename one of the two"
        return Failure(conditions.NAME_CONFLICT, message)
    return None


def _child_on_its_way_out(desired: Desired, observed: Observed) -> Failure | None:
    """A child that somebody has deleted and that is not gone: it cannot be made again before it is."""
    for child in desired.children:
        live = _live(observed, child)
        if live is not None and not is_alive(live):
            finalizers = ", ".join(live["metadata"].get("finalizers", ()))
            message = (
                f"{live['kind']} {live['metadata']['name']} was deleted and waits for its finalizers: {finalizers}"
            )
            return Failure(conditions.WAITING_FOR_GARBAGE_COLLECTION, message)
    return None


def _live(observed: Observed, child: Manifest) -> Manifest | None:
    """The object that is where this child should be."""
    return next((live for live in observed.children if identity(live) == identity(child)), None)


def _deployment(observed: Observed) -> Manifest | None:
    return next((child for child in observed.children if child["kind"] == "Deployment"), None)


def _last_revision(observed: Observed) -> str:
    """The revision that runs or is being rolled out, whatever the specification says by now."""
    assert observed.service is not None
    deployment = _deployment(observed)
    if deployment and is_ours(deployment, observed.service["metadata"]["uid"]):
        return str(_template_labels(deployment).get(names.LABEL_REVISION, ""))
    return str(observed.service.get("status", {}).get("revision", ""))


def _template_labels(deployment: Manifest) -> Mapping[str, str]:
    labels: Mapping[str, str] = deployment["spec"]["template"]["metadata"].get("labels") or {}
    return labels
