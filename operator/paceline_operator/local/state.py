"""What `paceline up` leaves on the disk for the other commands: a snapshot of its service, its logs, and a lock.

The lock is held as long as the process lives, so a snapshot of a process that was killed is known to be old.

    ~/.local/state/paceline/NAMESPACE/NAME/
        lock            held by `paceline up`, with its process id
        snapshot.json   the service as it is
        up.log          output of a detached `paceline up`
        pods/POD/server.log
    ~/.local/state/paceline/.gpus/      locks on GPUs, held by the `paceline up` whose pods use them
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline_operator.cluster import Key, Manifest
from paceline_operator.local.errors import AlreadyRunning

_LOCK_SECONDS = 0.5  # someone who only looks holds the lock for microseconds


@dataclass(frozen=True, slots=True)
class Phase:
    """A start-up phase of a server. `seconds` is how long it took, or has taken so far while it is not `done`."""

    name: str
    seconds: float
    done: bool


@dataclass(frozen=True, slots=True)
class Start:
    """The last start of a server.

    phases: so far. warnings: what makes the server slower than it could be. over: it has told all of them.
    """

    phases: tuple[Phase, ...] = ()
    warnings: tuple[str, ...] = ()
    over: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Start:
        """Read one out of a snapshot. Raises KeyError and TypeError."""
        phases = tuple(Phase(**phase) for phase in data["phases"])
        return cls(**{**data, "phases": phases, "warnings": tuple(data["warnings"])})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A service at one moment, as it is shown.

    url: of the front door. service: the LLMService. pods: each with name and status only.
    starts: of the servers that start or have started, by pod.
    """

    pid: int
    url: str
    service: Manifest
    pods: tuple[Manifest, ...] = ()
    starts: Mapping[str, Start] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """Of all servers, each once."""
        return list(dict.fromkeys(warning for start in self.starts.values() for warning in start.warnings))

    def to_json(self) -> str:
        """The snapshot as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Read what `to_json` has written. Raises ValueError for another release's, and for what is none."""
        try:
            data: dict[str, Any] = json.loads(text)
            starts = {pod: Start.from_json(found) for pod, found in data["starts"].items()}
            return cls(**{**data, "pods": tuple(data["pods"]), "starts": starts})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a snapshot of this release: {error!r}") from error


@dataclass(frozen=True, slots=True)
class StateFolder:
    """The folder of one service."""

    path: Path

    @classmethod
    def of(cls, key: Key, environment: Mapping[str, str]) -> StateFolder:
        """Where the service of this key has its state."""
        return cls(_root(environment) / key.namespace / key.name)

    @classmethod
    def all(cls, environment: Mapping[str, str]) -> list[StateFolder]:
        """Folders of all services that have been up on this machine."""
        return [cls(snapshot.parent) for snapshot in sorted(_root(environment).glob("*/*/snapshot.json"))]

    @property
    def pods(self) -> Path:
        """Folder of the pods' state and logs."""
        return self.path / "pods"

    @property
    def gpu_claims(self) -> Path:
        """Where GPUs are claimed: one folder for all services. No namespace begins with a dot."""
        return self.path.parent.parent / ".gpus"

    @property
    def log(self) -> Path:
        """Output of a detached `paceline up`."""
        return self.path / "up.log"

    def make(self) -> None:
        """Make the folder, for this user only: logs and manifests are nobody else's business."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, snapshot: Snapshot) -> None:
        """Replace the snapshot; a reader sees the old one or the new one."""
        scratch = self.path / "snapshot.json.new"
        scratch.write_text(snapshot.to_json(), encoding="utf-8")
        scratch.replace(self.path / "snapshot.json")

    def read(self) -> Snapshot | None:
        """The snapshot of a service that is up; None when none is, or it has not said anything that we can read."""
        holder = self.holder()
        with contextlib.suppress(FileNotFoundError, ValueError):
            snapshot = Snapshot.from_json((self.path / "snapshot.json").read_text(encoding="utf-8"))
            return snapshot if snapshot.pid == holder else None
        return None

    def forget(self) -> None:
        """Remove the snapshot of an earlier time."""
        (self.path / "snapshot.json").unlink(missing_ok=True)

    def holder(self) -> int | None:
        """The process that has this service up; None when there is none."""
        with contextlib.suppress(FileNotFoundError), (self.path / "lock").open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read()
                return int(holder) if holder else None  # nothing yet: it has just begun
        return None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the process that has this service up. Raises AlreadyRunning."""
        self.make()
        with (self.path / "lock").open("a+", encoding="utf-8") as file:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise AlreadyRunning(f"{self.path.name} is up already (process {self.holder()})") from None
                    time.sleep(0.01)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def _root(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".local" / "state"
    return Path(home) / "paceline"
