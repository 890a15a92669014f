"""Why a container has ended. Pure; called by `failures` for the containers of pods that are not ready.

Told by the container's termination (reason, exit code, last words), and where these fit several causes by what is known
of its pod beside them (`Record`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from paceline_operator import conditions
from paceline_operator.cluster import Manifest
from paceline_operator.failure import Failure
from paceline_operator.pods import event_time, is_drain, ready_changed_at
from paceline_operator.vocabulary import in_words_of_the_spec

# The server's last words: a reason in CamelCase (of several words, so that a log line's `INFO:` is none), a colon, a
# message of one line or more.
_LAST_WORDS: Final = re.compile(
    r"(?P<reason>(?=[A-Z0-9]*[a-z])[A-Z][a-z0-9]*([A-Z][a-z0-9]*)+): (?P<message>.+)", re.DOTALL
)
SIGKILLED: Final = 137
"""Exit code of a process that SIGKILL has ended; the kubelet gives it to a container that it has lost as well."""
_LOST: Final = "ContainerStatusUnknown"  # its reason for such a one, of which it knows no times either: they are null
_ENDED: Final = (0, 143, SIGKILLED)  # exit codes after the kubelet's SIGTERM: of a server that heeds it, and of others
_KILL: Final = "the server was killed (SIGKILL, exit code 137)"
_NOT_BY_PROBE: Final = (
    ", neither by a probe nor at a memory limit of its own: its node may be out of memory, as the kernel's log tells, "
    "or somebody has ended it"
)
_BY_ANYBODY: Final = (
    ", and no event tells any more by whom: a probe, a node out of memory, as the kernel's log tells, or somebody"
)
_PROBE_KILL: Final = re.compile(r"Container (?P<container>\S+) failed .*probe")
_TAIL: Final = 500  # characters of a log that stand in a message


@dataclass(frozen=True, slots=True)
class Record:
    """What tells the ends of a container apart that have the same exit code. Times as Kubernetes writes them.

    budget_seconds: how long a start may take.
    ready_changed: when the pod last became ready or ceased to be.
    last_told: when something was last told of the pod in an event; empty where nothing was.
    probe_kills: when the kubelet told first and last, in an event, that it ends the container because of a probe. What
        it tells again in the same words, of a later run, is the same event with a later last time.
    """

    budget_seconds: int
    ready_changed: str
    last_told: str
    probe_kills: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, pod: Manifest, container: str, startup_seconds: int, about: Collection[Manifest]) -> Record:
        """The record of a pod's container; `about` are the events about the pod that are known."""
        kills = (one for one in about if one.get("reason") == "Killing" and _by_probe(one, container))
        return cls(
            budget_seconds=startup_seconds,
            ready_changed=ready_changed_at(pod),
            last_told=max(map(event_time, about), default=""),
            probe_kills=tuple((one.get("firstTimestamp") or event_time(one), event_time(one)) for one in kills),
        )

    def timed_out(self, ended: dict[str, Any]) -> bool:
        """Whether this run took its whole budget and was never ready."""
        seconds = _seconds(ended)
        return seconds is not None and seconds >= self.budget_seconds and self.ready_changed <= ended["startedAt"]

    def went_silent(self, ended: dict[str, Any]) -> bool:
        """Whether this run was ready, and then not any more for some time before its end."""
        return str(ended.get("startedAt", "")) < self.ready_changed < str(ended.get("finishedAt", ""))

    def by_probe(self, ended: dict[str, Any]) -> bool | None:
        """Whether the kubelet ended this run because of a probe; None where events do not reach to its end."""
        started, finished = ended.get("startedAt"), ended.get("finishedAt")
        if not started or not finished:
            return None
        if any(first <= finished and started <= last for first, last in self.probe_kills):
            return True
        return False if self.last_told >= started else None


def termination(ended: dict[str, Any], record: Record) -> Failure | None:
    """A container that ended: by the kernel, with its own last words, or otherwise.

    None for one that was drained: it did what it was asked.
    """
    if is_drain(ended):
        return None
    code = ended.get("exitCode", 0)
    words = ended.get("message", "").strip()
    if ended.get("reason") == "OOMKilled":
        return Failure(conditions.OOM_KILLED, "the server was ended at its memory limit; raise resources.limits.memory")
    if code and (match := _LAST_WORDS.fullmatch(words)):
        return Failure(match["reason"], in_words_of_the_spec(match["message"]))
    if code in _ENDED and (failure := _ended_by_probe(ended, record)):
        return failure
    tail = words[-_TAIL:]
    last_lines = f": {tail}" if tail else ""
    if code == SIGKILLED and ended.get("reason") != _LOST:
        by_whom = _BY_ANYBODY if record.by_probe(ended) is None else _NOT_BY_PROBE
        return Failure(conditions.KILLED, f"{_KILL}{by_whom}{last_lines}")
    return Failure(conditions.CRASHED, f"the server ended with exit code {code}{last_lines}")


def _ended_by_probe(ended: dict[str, Any], record: Record) -> Failure | None:
    """A server that the kubelet ended, as far as is known. A SIGKILL that nobody owns up to may be anybody's."""
    code, by_probe = ended.get("exitCode", 0), record.by_probe(ended)
    if code == SIGKILLED and by_probe is False:
        return None
    if record.timed_out(ended):
        message = f"not ready within startupSeconds ({record.budget_seconds} s), restarted"
        return Failure(conditions.STARTUP_TIMEOUT, message)
    if code == 0 or by_probe or record.went_silent(ended):
        return Failure(conditions.RESTARTED, "the server stopped answering its probes and was restarted")
    return None


def _by_probe(event: Manifest, container: str) -> bool:
    told = _PROBE_KILL.match(event.get("message", ""))
    return told is not None and told["container"] == container


def _seconds(ended: dict[str, Any]) -> float | None:
    """How long a terminated container ran."""
    if not ended.get("startedAt") or not ended.get("finishedAt"):
        return None
    started, finished = (datetime.fromisoformat(ended[moment]) for moment in ("startedAt", "finishedAt"))
    return (finished - started).total_seconds()
