"""The pod's real failure, read from its status."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_operator.cluster import Manifest
from paceline_operator.desired import render
from paceline_operator.failure import Failure
from paceline_operator.failures import failure_of, needs_events
from paceline_operator.spec import parse_service
from paceline_operator.testing import llmservice, make_pod

DEPLOYMENT = render(parse_service(llmservice()), "image").deployment
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}


def read(**container: Any) -> Failure | None:
    """The failure of a pod whose server's container has this status."""
    return failure_of(make_pod(DEPLOYMENT, **container), startup_seconds=1800)


def ended(code: int, message: str = "", **fields: Any) -> dict[str, Any]:
    """A terminated state."""
    return {"terminated": {"exitCode": code, "message": message, "reason": "Error", **fields}}


def test_the_servers_last_words_become_reason_and_message() -> None:
    """The termination message `Reason: message` of the contract, through the crash loop that hides it."""
    words = "ModelNotFound: hf://x/y is neither in the model store /models nor on the hub (404)"
    assert read(state=BACK_OFF, lastState=ended(1, words)) == Failure(
        "ModelNotFound", "pod pod-0: hf://x/y is neither in the model store /models nor on the hub (404)"
    )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("engine.max_model_len: too large", "spec.engine.maxModelLen: too large"),
        ("kv_cache.offload.disk_path is no folder", "spec.engine.diskPath is no folder"),
        ("observability.trace_path is no file", "spec.engine.tracePath is no file"),
        ("kv_cache.handover.max_seconds: too small", "spec.handover.maxSeconds: too small"),
        ("engine.model_path: s3:// is not supported", "spec.model: s3:// is not supported"),
        ("scheduling.tiers.batch.ttft_ms: too small", "spec.scheduling.tiers.batch.ttftMs: too small"),
        ("tenants[0].key_files[0] (tenant a), line 1: short", "spec.tenants[0].keysFrom (tenant a), line 1: short"),
        ("tenants[0] (a) and tenants[1] (b) share", "spec.tenants[0] (a) and spec.tenants[1] (b) share"),
        ("batching.max_batch_size (9) > 8", "spec.engine.maxBatchSize (9) > 8"),
        ("/etc/engine.yaml and /x/engine.dtype", "/etc/engine.yaml and /x/engine.dtype"),
        ("torch.engine.dtype, engine.unheard_of", "torch.engine.dtype, engine.unheard_of"),
    ],
)
def test_settings_are_named_as_the_user_wrote_them(said: str, shown: str) -> None:
    """The server knows its configuration file only, and nobody who wrote an LLMService has seen that."""
    failure = read(state=BACK_OFF, lastState=ended(78, f"InvalidConfiguration: {said}"))
    assert failure == Failure("InvalidConfiguration", f"pod pod-0: {shown}")


@pytest.mark.parametrize("state", [BACK_OFF, {"running": {}}, {"waiting": {"reason": "ContainerCreating"}}])
def test_the_reason_stays_while_the_container_restarts(state: dict[str, Any]) -> None:
    """Between two attempts the condition must not flicker to Loading."""
    failure = read(state=state, lastState=ended(78, "InvalidConfiguration: engine.max_model_len: too small"))
    assert failure is not None
    assert failure.reason == "InvalidConfiguration"


def test_a_termination_before_the_last_start_that_succeeded_is_history() -> None:
    """The server came up again after its crash; that it is not ready today has another cause, such as its engine."""
    assert read(ready=False, started=True, lastState=ended(137, reason="OOMKilled")) is None


def test_a_container_that_runs_well_is_not_blamed_for_its_last_termination() -> None:
    """The pod is not ready because of another one."""
    assert read(ready=True, lastState=ended(1, "EngineFailed: x")) is None


def test_the_latest_termination_is_the_one_that_counts() -> None:
    """For a moment after it the container's state tells it, beside the one before."""
    failure = read(state=ended(78, "InvalidConfiguration: x"), lastState=ended(137, reason="OOMKilled"))
    assert failure is not None
    assert failure.reason == "InvalidConfiguration"


def test_a_server_that_ends_with_0_has_ended_all_the_same() -> None:
    """So that the reason does not go for the moment before the back-off."""
    failure = read(state=ended(0), lastState=ended(1, "EngineFailed: x"))
    assert failure is not None
    assert failure.reason == "Restarted"


def test_a_pod_that_loads_has_no_failure() -> None:
    """Not ready yet is not broken."""
    assert read() is None
    assert read(state={"waiting": {"reason": "ContainerCreating"}}) is None
    assert read(state={"waiting": {"reason": "PodInitializing"}}) is None


def test_a_kill_at_the_memory_limit_is_called_by_its_name() -> None:
    """Whatever the server wrote before."""
    failure = read(state=BACK_OFF, lastState=ended(137, "last log line", reason="OOMKilled"))
    assert failure is not None
    assert (failure.reason, "resources.limits.memory" in failure.message) == ("OOMKilled", True)


@pytest.mark.parametrize("log", ["INFO: model loaded\nKilled", "Error: no", "", "TRACE: x"])
def test_a_crash_without_last_words_shows_exit_code_and_log(log: str) -> None:
    """Log lines, which Kubernetes puts in place of a termination message, are not taken for a reason."""
    failure = read(state=BACK_OFF, lastState=ended(1, log))
    assert failure is not None
    assert failure.reason == "Crashed"
    assert "exit code 1" in failure.message
    assert " ".join(log.split()) in failure.message


@pytest.mark.parametrize(
    ("waiting", "reason", "message"),
    [
        ("ErrImagePull", "ImagePullBackOff", "manifest unknown"),
        ("ImagePullBackOff", "ImagePullBackOff", 'Back-off pulling image "x"'),
        ("InvalidImageName", "InvalidImageName", "couldn't parse image name"),
        ("CreateContainerConfigError", "CreateContainerConfigError", 'secret "hub-token" not found'),
        ("RunContainerError", "RunContainerError", "exec: not found"),
    ],
)
def test_a_container_that_cannot_start_says_what_is_missing(waiting: str, reason: str, message: str) -> None:
    """The kubelet's reason and message, with the missing object's name."""
    assert read(state={"waiting": {"reason": waiting, "message": message}}) == Failure(reason, f"pod pod-0: {message}")


def test_a_start_beyond_its_budget_is_a_startup_timeout() -> None:
    """The kubelet's SIGTERM makes the server end with 0, which alone would look like a clean exit."""
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:30:01Z", "reason": "Completed"}
    failure = read(lastState=ended(0, **times))
    assert failure is not None
    assert (failure.reason, "1800" in failure.message) == ("StartupTimeout", True)


def test_a_restart_by_the_liveness_probe_is_not_silent() -> None:
    """It ran for less than the start-up budget and ended with 0."""
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:10:00Z", "reason": "Completed"}
    failure = read(lastState=ended(0, **times))
    assert failure is not None
    assert failure.reason == "Restarted"


def after(code: int, *, unready_since: str, events: tuple[Manifest, ...] = ()) -> str | None:
    """What is said of a server that ended with this code after three days, in a pod that is not ready since then."""
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-04T00:00:00Z"}
    pod = make_pod(DEPLOYMENT, lastState=ended(code, **times))
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": unready_since}]
    failure = failure_of(pod, startup_seconds=1800, events=events)
    return failure.reason if failure else None


@pytest.mark.parametrize("code", [0, 143, 137])
def test_a_server_that_hangs_after_days_has_not_started_too_slowly(code: int) -> None:
    """The readiness probe noticed a minute before the liveness probe ended it; one that hangs heeds no SIGTERM."""
    assert after(code, unready_since="2026-01-03T23:59:00Z") == "Restarted"
    assert after(code, unready_since="2026-01-01T00:00:00Z") == "StartupTimeout"


def test_a_server_that_is_killed_while_it_serves_was_killed_by_no_probe() -> None:
    """None had found anything: the kubelet learns of its end by the end itself."""
    assert after(137, unready_since="2026-01-04T00:00:01Z") == "Killed"


def told(reason: str, message: str, at: str, **fields: str) -> Manifest:
    """An event about the pod."""
    about = {"metadata": {}, "involvedObject": {"uid": "uid-of-pod-0"}}
    return {**about, "type": "Normal", "reason": reason, "message": message, "lastTimestamp": at, **fields}


@pytest.mark.parametrize("unready_since", ["2026-01-01T00:00:00Z", "2026-01-03T23:59:00Z", "2026-01-04T00:00:01Z"])
def test_events_tell_a_kill_by_a_probe_from_a_kill_by_anybody_else(unready_since: str) -> None:
    """Whatever the readiness looked like: a server that drains, or whose engine restarts, can be killed too."""
    again = told("Started", "Started container server", "2026-01-04T00:00:02Z")
    long_ago = told("Killing", "Container server failed startup probe, will be restarted", "2025-12-31T23:00:00Z")
    probe = told("Killing", "Container server failed liveness probe, will be restarted", "2026-01-03T23:59:30Z")
    assert after(137, unready_since=unready_since, events=(long_ago, again)) == "Killed"
    assert after(137, unready_since=unready_since, events=(long_ago, probe, again)) != "Killed"


def test_a_probe_of_another_container_has_not_killed_the_server() -> None:
    start = told("Started", "Started container server", "2026-01-04T00:00:00Z")
    for message in ("Container proxy failed liveness probe, will be restarted", "Stopping container a-probe"):
        beside = told("Killing", message, "2026-01-03T23:59:30Z")
        assert after(137, unready_since="2026-01-01T00:00:00Z", events=(beside, start)) == "Killed"


def test_a_probe_that_kills_the_next_run_as_well_leaves_the_reason_of_the_one_before() -> None:
    """The two kills are one event with two times, and until the second has been obeyed the first run ended last."""
    message = "Container server failed startup probe, will be restarted"
    probe = told("Killing", message, "2026-01-04T01:00:00Z", firstTimestamp="2026-01-03T23:59:30Z")
    assert after(137, unready_since="2026-01-01T00:00:00Z", events=(probe,)) == "StartupTimeout"


def test_events_of_long_ago_tell_nothing_of_who_killed_a_server() -> None:
    """The API server forgets them after an hour."""
    scheduled = told("Scheduled", "Successfully assigned", "2025-12-31T00:00:00Z")
    assert after(137, unready_since="2026-01-03T23:59:00Z", events=(scheduled,)) == "Restarted"


def test_a_container_that_its_node_has_lost_was_killed_by_nobody_that_is_known() -> None:
    """After a node's restart: the kubelet invents the exit code, and has null for the times."""
    lost = "The container could not be located when the pod was deleted. The container used to be Running"
    state = ended(137, lost, reason="ContainerStatusUnknown", startedAt=None, finishedAt=None)
    probe = told("Killing", "Container server failed liveness probe, will be restarted", "2026-01-03T23:59:30Z")
    for events in ((), (probe,)):
        failure = failure_of(make_pod(DEPLOYMENT, lastState=state), startup_seconds=1800, events=events)
        assert failure is not None
        assert failure.reason == "Crashed"
        assert lost in failure.message


def test_a_kill_says_what_it_was_not_and_where_to_look() -> None:
    failure = read(state=BACK_OFF, lastState=ended(137, "last log line"))
    assert failure is not None
    assert "SIGKILL" in failure.message
    assert "neither by a probe" not in failure.message  # there are no events to tell
    assert failure.message.endswith(": last log line")


def test_of_a_pod_that_was_killed_the_events_are_wanted_until_it_has_come_up_again() -> None:
    assert needs_events(make_pod(DEPLOYMENT, lastState=ended(137)))
    assert needs_events(make_pod(DEPLOYMENT, state=ended(137)))
    assert not needs_events(make_pod(DEPLOYMENT, ready=True, lastState=ended(137)))
    assert not needs_events(make_pod(DEPLOYMENT, lastState=ended(1)))


def test_of_pods_that_are_to_serve_no_more_no_events_are_read() -> None:
    """They would be read in place of those of a pod that waits: of a few pods they are."""
    evicted, leaving = (make_pod(DEPLOYMENT, state=ended(137)) for _ in range(2))
    evicted["status"] |= {"phase": "Failed", "reason": "Evicted"}
    leaving["metadata"]["deletionTimestamp"] = "2026-01-04T00:00:00Z"
    assert not needs_events(evicted)
    assert not needs_events(leaving)


@pytest.mark.parametrize("state", [BACK_OFF, {"running": {}}, {"waiting": {"reason": "ContainerCreating"}}])
def test_a_server_that_was_drained_on_request_has_not_failed(state: dict[str, Any]) -> None:
    """The kubelet starts it again, after a while with back-off; its last words tell it from a failed probe."""
    assert read(state=state, lastState=ended(0, "Drained: POST /drain was called", reason="Completed")) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", "NoSpareGPU"),
        ("0/1 nodes are available: 1 Insufficient cpu.", "Unschedulable"),
    ],
)
def test_a_pod_without_a_node_says_what_it_wants(message: str, reason: str) -> None:
    """Want of a GPU has a reason of its own."""
    pod = make_pod(DEPLOYMENT)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod["status"] = {"phase": "Pending", "conditions": [condition]}
    assert failure_of(pod, 1800) == Failure(reason, f"pod pod-0: {message}")


@pytest.mark.parametrize("code", [0, 137])
def test_an_evicted_pod_says_why(code: int) -> None:
    """Reason and message of the pod's own status, and not that its container was killed for it."""
    pod = make_pod(DEPLOYMENT, state=ended(code))
    pod["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    assert failure_of(pod, 1800) == Failure("Evicted", "pod pod-0: The node was low on resource: memory.")


def test_an_init_container_of_the_overlay_fails_under_its_own_name() -> None:
    """The user finds which of the containers it is."""
    pod = make_pod(DEPLOYMENT, state={"waiting": {"reason": "PodInitializing"}})
    pod["status"]["initContainerStatuses"] = [{"name": "fetch", "state": ended(2, "no route to host")}]
    failure = failure_of(pod, 1800)
    assert failure is not None
    assert failure.message.startswith("pod pod-0: container fetch: ")


@pytest.mark.parametrize(("state", "fails"), [({"running": {}}, True), (ended(0, reason="Completed"), False)])
def test_an_init_container_has_failed_until_it_has_done_its_work(state: dict[str, Any], fails: bool) -> None:
    """Without a startup probe it has started as soon as it runs, which proves nothing."""
    pod = make_pod(DEPLOYMENT, state={"waiting": {"reason": "PodInitializing"}})
    again = {"name": "fetch", "started": True, "ready": not fails, "state": state, "lastState": ended(2, "no route")}
    pod["status"]["initContainerStatuses"] = [again]
    assert (failure_of(pod, 1800) is not None) == fails


def test_a_pod_whose_node_is_lost_says_so() -> None:
    """The kubelet's last word stands, by which all containers are ready; the node controller takes Ready away."""
    pod = make_pod(DEPLOYMENT, ready=True)
    pod["spec"] = {**pod["spec"], "nodeName": "node-7"}
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    failure = failure_of(pod, 1800)
    assert failure is not None
    assert failure.reason == "NodeNotReady"
    assert "node-7" in failure.message


def warning(pod: Manifest, reason: str, message: str, moment: str) -> Manifest:
    """A Warning event about a pod."""
    return {
        "metadata": {"creationTimestamp": moment},
        "involvedObject": {"uid": pod["metadata"]["uid"]},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": moment,
    }


def test_a_volume_that_does_not_mount_is_read_from_the_latest_event() -> None:
    """The pod's status only says ContainerCreating, for ever."""
    pod = make_pod(DEPLOYMENT, state={"waiting": {"reason": "ContainerCreating"}})
    other = make_pod(DEPLOYMENT, "pod-1")
    events = [
        warning(pod, "FailedMount", 'secret "tls" not found', "2026-01-01T00:02:00Z"),
        warning(pod, "FailedAttachVolume", "older", "2026-01-01T00:01:00Z"),
        warning(other, "FailedMount", "another pod's", "2026-01-01T00:03:00Z"),
    ]
    assert failure_of(pod, 1800, events) == Failure("FailedMount", 'pod pod-0: secret "tls" not found')


def test_old_warnings_do_not_outlive_their_cause() -> None:
    """Once the container runs, what hindered it before is history."""
    pod = make_pod(DEPLOYMENT)
    assert failure_of(pod, 1800, [warning(pod, "FailedMount", "x", "2026-01-01T00:00:00Z")]) is None


def test_an_event_without_a_reason_is_a_warning_all_the_same() -> None:
    """Anybody may write one, and the API server takes it."""
    pod = make_pod(DEPLOYMENT, state={"waiting": {"reason": "ContainerCreating"}})
    about = {"uid": pod["metadata"]["uid"]}
    bare = {"involvedObject": about, "metadata": {"creationTimestamp": "2026-01-01T00:01:00Z"}}
    assert failure_of(pod, 1800, [bare]) is None
    assert failure_of(pod, 1800, [{**bare, "type": "Warning"}]) == Failure("Warning", "pod pod-0: Warning")


@pytest.mark.parametrize(("warned", "step"), [("FailedScheduling", "Scheduled"), ("FailedMount", "Pulling")])
def test_a_warning_is_history_once_the_pod_has_got_further(warned: str, step: str) -> None:
    """An image is pulled for minutes, in which the status says no more than before the pod had a node or its volume."""
    pod = make_pod(DEPLOYMENT, state={"waiting": {"reason": "ContainerCreating"}})
    before = warning(pod, warned, "Insufficient nvidia.com/gpu", "2026-01-01T00:01:00Z")
    further = warning(pod, step, "", "2026-01-01T00:02:00Z") | {"type": "Normal"}
    again = warning(pod, "FailedMount", "timed out", "2026-01-01T00:03:00Z")
    assert failure_of(pod, 1800, [before, further]) is None
    assert failure_of(pod, 1800, [before, further, again]) == Failure("FailedMount", "pod pod-0: timed out")


def test_a_message_is_one_line_of_bounded_length() -> None:
    """Conditions are read in tables; the log has the rest."""
    failure = read(state=BACK_OFF, lastState=ended(1, "EngineFailed: a\n  b\n" + "x" * 5000))
    assert failure is not None
    assert failure.message.startswith("pod pod-0: a b xxx")
    assert len(failure.message) == 1000
