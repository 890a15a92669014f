"""What is shown while a service starts: each fact once, what goes on now, and when waiting is of no use."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from paceline_operator.cluster import Manifest
from paceline_operator.local import progress
from paceline_operator.local.outlook import hopeless, unmendable
from paceline_operator.local.progress import Progress
from paceline_operator.local.state import Phase, Snapshot, Start

URL = "http://127.0.0.1:8000"


def condition(kind: str, status: str, reason: str = "", message: str = "") -> Manifest:
    said = {"reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {"type": kind, "status": status, **said}


def degraded(reason: str) -> Manifest:
    return condition("Degraded", "True", reason, "m")


def make_pod(
    name: str = "a",
    *,
    ready: bool = False,
    restarts: int = 0,
    state: Manifest | None = None,
    last: Manifest | None = None,
) -> Manifest:
    states = {"state": state or {"running": {}}, "lastState": last or {}}
    container = {"name": "server", "restartCount": restarts, **states}
    conditions = [condition("PodScheduled", "True"), condition("Ready", str(ready))]
    return {"metadata": {"name": name}, "status": {"conditions": conditions, "containerStatuses": [container]}}


def make_snapshot(
    *conditions: Manifest, pods: tuple[Manifest, ...] = (), generation: int = 1, **phases: Any
) -> Snapshot:
    service = {
        "metadata": {"name": "x", "generation": generation},
        "spec": {"replicas": 2},
        "status": {"conditions": list(conditions)},
    }
    starts = {name: Start(found, over=all(phase.done for phase in found)) for name, found in phases.items()}
    return Snapshot(1, URL, service, pods, starts)


LOADING = Phase("load_weights", 3.2, done=False)
LOADED = Phase("load_weights", 4.0, done=True)


class Terminal(io.StringIO):
    """A terminal that can move its cursor."""

    def isatty(self) -> bool:
        return True


def test_a_finished_phase_is_said_once_and_a_running_one_not_at_all_on_a_plain_output() -> None:
    output = io.StringIO()
    shown = Progress(output)
    for phase in (LOADING, LOADED, LOADED):
        shown.show(make_snapshot(pods=(make_pod(),), a=(phase,)))
    assert output.getvalue() == "  ✓ load weights           4.0 s\n"


def test_a_long_phase_is_mentioned_now_and_then_on_a_plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_HEARTBEAT_SECONDS", -1.0)
    output = io.StringIO()
    Progress(output).show(make_snapshot(pods=(make_pod(),), a=(LOADING,)))
    assert output.getvalue() == "  … load weights           3.2 s\n"


def test_on_a_terminal_what_goes_on_is_one_line_that_is_taken_away_before_the_next() -> None:
    output = Terminal()
    shown = Progress(output)
    shown.show(make_snapshot(pods=(make_pod(),), a=(LOADING,)))
    assert "load weights           3.2 s" in output.getvalue()
    assert not output.getvalue().endswith("\n")
    shown.say("next")
    assert output.getvalue().endswith("\r\x1b[Knext\n")


def test_lines_of_several_pods_say_which_pod_they_are_about() -> None:
    pods = (make_pod("a"), make_pod("b"))
    lines = [fact.text for fact in progress.facts(make_snapshot(pods=pods, a=(LOADED,), b=(LOADED,)))]
    assert [line.split()[-1] for line in lines] == ["a", "b"]


def test_ready_is_not_said_before_the_phases_of_a_ready_server_have_ended() -> None:
    ready = condition("Ready", "True", "Serving")
    pods = (make_pod(ready=True),)
    assert not [fact for fact in progress.facts(make_snapshot(ready, pods=pods, a=(LOADING,))) if URL in fact.text]
    assert [fact.text for fact in progress.facts(make_snapshot(ready, pods=pods, a=(LOADED,)))][-1] == f"Ready: {URL}"


def test_what_makes_the_servers_slower_is_said_once_and_before_ready() -> None:
    ready, pods = condition("Ready", "True", "Serving"), (make_pod("a", ready=True), make_pod("b", ready=True))
    start = Start((LOADED,), ("slower, set spec.engine.dtype",), over=True)
    snapshot = replace(make_snapshot(ready, pods=pods), starts={"a": start, "b": start})
    output = io.StringIO()
    shown = Progress(output)
    for _ in range(2):
        shown.show(snapshot)
    assert output.getvalue().splitlines()[2:] == [
        "  ! slower, set spec.engine.dtype", f"2 replicas ready: {URL}"
    ]  # fmt: skip


def test_ready_is_not_said_while_a_server_may_have_more_to_tell() -> None:
    """Its phases have ended, and it has not been asked since."""
    ready, pods = condition("Ready", "True", "Serving"), (make_pod(ready=True),)
    snapshot = replace(make_snapshot(ready, pods=pods), starts={"a": Start((LOADED,))})
    assert not progress.serves(snapshot)


def test_scaling_and_failures_are_facts_too() -> None:
    failure = condition("Degraded", "True", "OutOfMemory", "the KV cache does not fit")
    texts = [fact.text for fact in progress.facts(make_snapshot(failure, generation=2))]
    assert texts == ["  ✗ OutOfMemory: the KV cache does not fit", "  ⇅ scaling to 2 replicas"]


BACKING_OFF = {"waiting": {"reason": "CrashLoopBackOff"}}
CREATING = {"waiting": {"reason": "ContainerCreating"}}


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (make_snapshot(degraded("Crashed"), pods=(make_pod(),)), None),  # its first restart
        (make_snapshot(degraded("Crashed"), pods=(make_pod(state=BACKING_OFF),)), "Crashed: m"),
        (make_snapshot(condition("Degraded", "False"), pods=(make_pod(state=CREATING),)), None),
        (make_snapshot(degraded("FailedMount"), pods=(make_pod(state=CREATING),)), "FailedMount: m"),
        (make_snapshot(condition("Ready", "False", "ScaledToZero", "spec.replicas is 0")), "spec.replicas is 0"),
        (make_snapshot(), None),
    ],
)
def test_waiting_is_given_up_only_where_it_changes_nothing(snapshot: Snapshot, expected: str | None) -> None:
    assert hopeless(snapshot) == expected


def test_a_failure_is_not_shown_where_it_becomes_the_error() -> None:
    output = io.StringIO()
    Progress(output).show(make_snapshot(degraded("Crashed"), pods=(make_pod(restarts=1),)), failures=False)
    assert output.getvalue() == "  ↻ restarted (1)\n"


def ended(code: int, words: str) -> Manifest:
    return {"terminated": {"exitCode": code, "message": words}}


def unplaced(name: str) -> Manifest:
    condition = {"type": "PodScheduled", "status": "False", "message": "1 Insufficient cpu"}
    return {"metadata": {"name": name}, "status": {"conditions": [condition]}}


NO_SECRET = {"waiting": {"reason": "CreateContainerConfigError", "message": "set HF_TOKEN"}}
NO_MODEL = ended(78, "ModelNotFound: no such model")


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ((make_pod(state=NO_MODEL),), "ModelNotFound: pod a: no such model"),
        ((make_pod(last=NO_MODEL, restarts=1),), "ModelNotFound: pod a: no such model"),
        ((make_pod(), make_pod("b", last=NO_MODEL, state=BACKING_OFF)), "ModelNotFound: pod b: no such model"),
        ((make_pod(state=ended(1, "IndexError")),), None),
        ((make_pod(last=ended(137, ""), state=BACKING_OFF),), None),
        ((make_pod(state=CREATING),), None),
        ((make_pod(state=NO_SECRET),), "CreateContainerConfigError: pod a: set HF_TOKEN"),
        ((unplaced("a"),), "Unschedulable: pod a: 1 Insufficient cpu"),
        ((unplaced("a"), make_pod("b")), None),  # room for one is enough to serve
        ((unplaced("a"), {"metadata": {"name": "b"}, "status": {"phase": "Pending"}}), None),  # nobody has looked at b
        ((), None),
    ],
)
def test_a_service_that_was_never_ready_is_given_up_where_no_restart_helps(
    pods: tuple[Manifest, ...], expected: str | None
) -> None:
    assert unmendable(make_snapshot(pods=pods)) == expected


def test_a_snapshot_survives_the_disk() -> None:
    snapshot = make_snapshot(condition("Ready", "True"), pods=(make_pod(),), a=(LOADED, LOADING))
    snapshot = replace(snapshot, starts={**snapshot.starts, "b": Start((LOADED,), ("slow",), over=True)})
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
