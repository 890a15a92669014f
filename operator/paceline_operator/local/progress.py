"""What `paceline up` prints while a service starts and runs: one line for each fact, once, and what goes on right now.

`facts` and `current` are pure; `Progress` prints. On a terminal the line of what goes on moves; elsewhere it is
repeated now and then, so that a log shows that something happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from paceline_operator.local.startup import START_PROCESS
from paceline_operator.local.state import Phase, Snapshot, Start
from paceline_operator.pods import condition_of, is_ready, is_running, restart_count, was_drained

_LABELS = {
    START_PROCESS: "start server",
    "start_engine": "start engine",
    "fetch_model": "fetch model",
    "load_weights": "load weights",
    "allocate_kv_cache": "allocate KV cache",
    "warmup": "warm up",
}
_LABEL_WIDTH = 20
_HEARTBEAT_SECONDS = 10.0
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR_LINE = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that has happened. The key tells it from others, so that it is said once."""

    key: str
    text: str
    is_failure: bool = False


def facts(snapshot: Snapshot) -> Iterator[Fact]:
    """Everything worth a line, in the order of its happening as far as that is known."""
    for pod in snapshot.pods:
        name, restarts = pod["metadata"]["name"], restart_count(pod)
        if restarts:
            what = "drained, and started again" if was_drained(pod) else "restarted"
            yield Fact(f"{name}/restart/{restarts}", f"  ↻ {what}{_which(snapshot, name)} ({restarts})")
        for phase in snapshot.starts.get(name, Start()).phases:
            if phase.done:
                yield Fact(f"{name}/{restarts}/{phase.name}", f"  ✓ {_line(phase)}{_which(snapshot, name)}")
    for warning in snapshot.warnings:
        yield Fact(f"warning/{warning}", f"  ! {warning}")
    degraded = condition_of(snapshot.service, "Degraded")
    if degraded.get("status") == "True":
        reason, message = degraded["reason"], degraded["message"]
        yield Fact(f"degraded/{reason}/{message}", f"  ✗ {reason}: {message}", is_failure=True)
    generation, wanted = snapshot.service["metadata"]["generation"], snapshot.service["spec"]["replicas"]
    if generation > 1:
        yield Fact(f"scale/{generation}", f"  ⇅ scaling to {wanted} replica{'s' if wanted != 1 else ''}")
    if serves(snapshot):
        since = condition_of(snapshot.service, "Ready")["lastTransitionTime"]
        count = sum(is_ready(pod) for pod in snapshot.pods)
        yield Fact(f"ready/{count}/{since}", f"{f'{count} replicas ready' if count > 1 else 'Ready'}: {snapshot.url}")


def serves(snapshot: Snapshot) -> bool:
    """Whether the service is ready, and a ready server has told its start to the end."""
    if condition_of(snapshot.service, "Ready").get("status") != "True":
        return False
    ready = (pod["metadata"]["name"] for pod in snapshot.pods if is_ready(pod))
    return any(name not in snapshot.starts or snapshot.starts[name].over for name in ready)


def current(snapshot: Snapshot) -> str | None:
    """What goes on now: the phase of a server that starts; None when nothing does."""
    for pod in snapshot.pods:
        name = pod["metadata"]["name"]
        for phase in snapshot.starts.get(name, Start()).phases:
            if not phase.done and is_running(pod):
                return f"{_line(phase)}{_which(snapshot, name)}"
    return None


def _line(phase: Phase) -> str:
    return f"{_LABELS.get(phase.name, phase.name):<{_LABEL_WIDTH}}{phase.seconds:6.1f} s"


def _which(snapshot: Snapshot, pod_name: str) -> str:
    """Which pod a line is about, where there are several."""
    return f"   {pod_name}" if len(snapshot.pods) > 1 else ""


class Progress:
    """Prints facts as they come up."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._moves = output.isatty()
        self._said: set[str] = set()
        self._frame = 0
        self._beat = time.monotonic()
        self._shown = False

    def show(self, snapshot: Snapshot, *, failures: bool = True) -> None:
        """Print what is new, and what goes on; of failures only where whoever calls does not tell them."""
        for fact in facts(snapshot):
            if fact.key not in self._said and (failures or not fact.is_failure):
                self._said.add(fact.key)
                self.say(fact.text)
        now_going_on = current(snapshot)
        if now_going_on is None:
            self.clear()
        elif self._moves:
            self._frame += 1
            self._write(f"{_CLEAR_LINE}  {_SPINNER[self._frame % len(_SPINNER)]} {now_going_on}")
            self._shown = True
        elif time.monotonic() - self._beat > _HEARTBEAT_SECONDS:
            self.say(f"  … {now_going_on}")

    def leave_out(self, snapshot: Snapshot) -> None:
        """Take what has happened so far for said."""
        self._said.update(fact.key for fact in facts(snapshot))

    def say(self, text: str) -> None:
        """Print a line."""
        self.clear()
        self._write(f"{text}\n")
        self._beat = time.monotonic()

    def stream(self, text: str) -> None:
        """Print a piece of a line."""
        self.clear()
        self._write(text)

    def clear(self) -> None:
        """Take the moving line away."""
        if self._shown:
            self._write(_CLEAR_LINE)
            self._shown = False

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()
