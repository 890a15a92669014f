"""What the status says of one service, from its first sight on, on a cluster in dictionaries."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from reconciling import IMAGE, KEY, Stage, events, kinds, serving

from paceline_operator import reconcile as reconcile_module
from paceline_operator.cluster import Load, Manifest, PatchStatus
from paceline_operator.reconcile import reconcile
from paceline_operator.testing import make_pod


async def test_readiness_follows_the_pods_and_is_announced_once() -> None:
    """Not before the pod's own Ready condition; one event for each transition."""
    stage = Stage()
    await stage.reconcile()
    stage.run_pods(make_pod(stage.deployment))
    loading = await stage.reconcile()
    assert stage.verdict() == ("False", "Loading")
    assert events(loading) == [("Normal", "Loading")]
    stage.run_pods(make_pod(stage.deployment, ready=True))
    ready = await stage.reconcile()
    assert stage.verdict() == ("True", "Serving")
    assert stage.verdict("Progressing") == ("False", "UpToDate")
    assert events(ready) == [("Normal", "Serving"), ("Normal", "UpToDate")]
    assert await stage.reconcile() == []


async def test_the_transition_time_moves_only_with_the_status() -> None:
    """A new reason or message does not make the condition young again."""
    stage = Stage()
    await stage.reconcile()
    before = stage.condition()["lastTransitionTime"]
    stage.now += timedelta(minutes=1)
    stage.run_pods(make_pod(stage.deployment))
    await stage.reconcile()
    assert stage.condition()["lastTransitionTime"] == before
    stage.run_pods(make_pod(stage.deployment, ready=True))
    await stage.reconcile()
    assert datetime.fromisoformat(stage.condition()["lastTransitionTime"]) == stage.now


async def test_a_failing_pod_is_shown_and_forgotten_when_corrected() -> None:
    """The server's reason while it fails; Loading and Serving for the corrected revision, old pod or not."""
    stage = Stage(model="hf://no/such")
    await stage.reconcile()
    gone = {"terminated": {"exitCode": 1, "message": "ModelNotFound: hf://no/such is not on the hub (404)"}}
    failing = make_pod(stage.deployment, lastState=gone, state={"waiting": {"reason": "CrashLoopBackOff"}})
    stage.run_pods(failing)
    actions = await stage.reconcile()
    assert stage.verdict() == ("False", "ModelNotFound")
    assert stage.verdict("Degraded") == ("True", "ModelNotFound")
    assert stage.verdict("Progressing") == ("False", "ModelNotFound")
    assert ("Warning", "ModelNotFound") in events(actions)
    stage.edit(model="hf://org/name")
    await stage.reconcile()
    stage.run_pods(failing, make_pod(stage.deployment, "pod-new"))
    await stage.reconcile()
    assert stage.verdict() == ("False", "Loading")
    stage.run_pods(make_pod(stage.deployment, "pod-new", ready=True))
    await stage.reconcile()
    assert (stage.verdict(), stage.verdict("Degraded")) == (("True", "Serving"), ("False", "AsExpected"))


async def test_a_correction_is_not_told_the_failure_of_what_it_corrects() -> None:
    """From its first status on, which is written before any pod of it exists: somebody may wait for that generation."""
    stage = Stage(model="hf://no/such")
    await stage.reconcile()
    gone = {"terminated": {"exitCode": 1, "message": "ModelNotFound: hf://no/such is not on the hub (404)"}}
    failing = make_pod(stage.deployment, state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=gone)
    evicted = make_pod(stage.deployment, "pod-evicted") | {"status": {"phase": "Failed", "reason": "Evicted"}}
    stage.run_pods(failing, evicted)
    await stage.reconcile()
    stage.edit(model="hf://org/name")
    await stage.reconcile()
    assert stage.service["status"]["observedGeneration"] == 2
    assert stage.verdict() == ("False", "CreatingPods")
    assert stage.verdict("Progressing") == ("True", "RollingOut")
    assert stage.verdict("Degraded") == ("False", "AsExpected")


LATE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out"}
REFUSED = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}


@pytest.mark.parametrize("condition", [LATE, REFUSED], ids=["late", "refused"])
async def test_the_deployments_verdict_counts_once_its_controller_has_seen_what_was_asked(
    condition: dict[str, str],
) -> None:
    """Neither in the pass that applies another template nor until the controller has looked at it."""
    stage = Stage()
    await stage.reconcile()
    stage.deployment["status"] = {"conditions": [condition]}
    stage.edit(drainSeconds=5)
    await stage.reconcile()
    assert stage.verdict("Progressing") == ("True", "CreatingPods")
    stage.deployment["metadata"]["generation"] = 2
    stage.deployment["status"]["observedGeneration"] = 1
    await stage.reconcile()
    assert stage.verdict("Progressing") == ("True", "CreatingPods")
    stage.deployment["status"]["observedGeneration"] = 2
    await stage.reconcile()
    assert stage.verdict("Progressing")[0] == "False"


async def test_zero_replicas_are_no_failure() -> None:
    """The reason says that nobody has to look for a fault."""
    stage = await serving()
    stage.edit(replicas=0)
    stage.run_pods()
    await stage.reconcile()
    assert stage.verdict() == ("False", "ScaledToZero")
    assert stage.verdict("Degraded") == ("False", "AsExpected")


@pytest.mark.parametrize(
    ("able", "active", "verdict"),
    [
        (("True", "ReadyForNewScale"), ("True", "ValidMetricFound"), ("True", "ValidMetricFound")),
        (("True", "SucceededGetScale"), ("False", "FailedGetObjectMetric"), ("False", "FailedGetObjectMetric")),
        (("False", "FailedGetScale"), ("True", "ValidMetricFound"), ("False", "FailedGetScale")),
    ],
)
async def test_scaling_ready_says_what_the_hpa_says(
    able: tuple[str, str], active: tuple[str, str], verdict: tuple[str, str]
) -> None:
    """With the HPA's own reason."""
    stage = await serving(autoscaling={"maxReplicas": 2})
    reported = (("AbleToScale", *able), ("ScalingActive", *active), ("ScalingLimited", "True", "TooFewReplicas"))
    stage.cluster.child(KEY, "HorizontalPodAutoscaler")["status"] = {
        "conditions": [{"type": kind, "status": status, "reason": reason} for kind, status, reason in reported]
    }
    await stage.reconcile()
    assert stage.verdict("ScalingReady") == verdict


async def test_an_invalid_specification_is_explained_and_what_runs_keeps_running() -> None:
    """All mistakes in the message; children stay as they are."""
    stage = await serving()
    stage.edit(engine={"maxModelLn": 5}, drainSeconds=-1)
    assert kinds(await stage.reconcile()) == []
    assert stage.verdict() == ("True", "ServingDegraded")
    message = stage.condition("Degraded")["message"]
    assert "spec.engine.maxModelLn: unknown field, did you mean maxModelLen?" in message
    assert "spec.drainSeconds" in message
    assert stage.service["status"]["observedGeneration"] == 2


async def test_refused_pods_are_explained() -> None:
    """Quota and pod security are said by the Deployment, for there is no pod that could say it."""
    stage = Stage()
    await stage.reconcile()
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    stage.deployment["status"] = {"conditions": [refused]}
    await stage.reconcile()
    assert stage.verdict() == ("False", "PodsRefused")
    assert stage.condition()["message"] == "exceeded quota: gpus"


async def test_an_evicted_pod_is_news_only_until_its_successor_serves() -> None:
    """Its record stays for days."""
    stage = await serving()
    evicted = make_pod(stage.deployment, "pod-evicted")
    evicted["status"] = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
    stage.run_pods(evicted)
    await stage.reconcile()
    assert stage.verdict() == ("False", "Evicted")
    stage.run_pods(evicted, make_pod(stage.deployment, "pod-1", ready=True))
    await stage.reconcile()
    assert (stage.verdict(), stage.verdict("Degraded")) == (("True", "Serving"), ("False", "AsExpected"))


def evicted_at(moment: str | None, deployment: Manifest) -> Manifest:
    """The record of a pod that was made on the first of January."""
    conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": moment}] if moment else []
    status = {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "conditions": conditions}
    return created_at("2026-01-01T00:00:00Z", make_pod(deployment, "pod-evicted") | {"status": status})


def created_at(moment: str, pod: Manifest) -> Manifest:
    """The pod, made then."""
    return pod | {"metadata": pod["metadata"] | {"creationTimestamp": moment}}


@pytest.mark.parametrize(
    ("lost", "serves_since", "verdict"),
    [
        ("2026-01-02T12:00:00Z", "2026-01-03T00:00:00Z", ("False", "AsExpected")),
        ("2026-01-02T12:00:00Z", "2026-01-02T00:00:00Z", ("True", "Evicted")),
        (None, "2026-01-01T00:00:01Z", ("False", "AsExpected")),
    ],
)
async def test_an_eviction_that_was_made_good_is_no_news_when_more_replicas_are_asked_for(
    lost: str | None, serves_since: str, verdict: tuple[str, str]
) -> None:
    """A pod that serves and was made since is its successor; one that was there before is not."""
    stage = await serving()
    stage.edit(replicas=2)
    stage.run_pods(
        evicted_at(lost, stage.deployment),
        created_at(serves_since, make_pod(stage.deployment, "pod-1", ready=True)),
        created_at("2026-01-04T00:00:00Z", make_pod(stage.deployment, "pod-2")),
    )
    await stage.reconcile()
    assert stage.verdict("Degraded") == verdict


async def test_a_server_that_was_ready_and_is_not_is_not_called_loading() -> None:
    """Its engine restarts, or it drains: somebody may want to look."""
    stage = await serving()
    stage.run_pods(make_pod(stage.deployment, ready=False, started=True))
    actions = await stage.reconcile()
    assert stage.verdict() == ("False", "NotReady")
    assert ("Warning", "NotReady") in events(actions)


async def test_load_is_written_when_it_changes_and_taken_back_when_it_is_unknown() -> None:
    """A failed scrape is missing, never zero."""
    stage = await serving()
    stage.cluster.load = Load(queue_depth=3, ttft_p95=0.41234)
    (patch,) = await stage.reconcile()
    assert isinstance(patch, PatchStatus)
    assert (patch.status["queueDepth"], patch.status["ttftP95"]) == (3, 0.412)
    assert await stage.reconcile() == []
    stage.cluster.load = Load()
    await stage.reconcile()
    assert not {"queueDepth", "ttftP95"} & stage.service["status"].keys()


async def test_a_pod_that_waits_silently_is_looked_at_again() -> None:
    """The event that explains it changes none of the objects that are watched."""
    stage = Stage()
    await stage.reconcile()
    stage.run_pods(make_pod(stage.deployment, state={"waiting": {"reason": "ContainerCreating"}}))
    assert await reconcile(stage.cluster, KEY, IMAGE) == reconcile_module.SILENT_PODS_SECONDS
    stage.run_pods(make_pod(stage.deployment))
    assert await reconcile(stage.cluster, KEY, IMAGE) is None
