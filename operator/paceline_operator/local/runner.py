"""One pod on this machine, from its placement to the end of its process: start, probes, restarts, status.

A runner belongs to the kubelet. It writes nothing but the status of its pod, and the events about what it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.conditions import timestamp
from paceline_operator.local import container, machine, probes, volumes
from paceline_operator.local import pod as pods_
from paceline_operator.local import secrets as secrets_
from paceline_operator.local.backoff import BackOff
from paceline_operator.local.errors import CannotStart
from paceline_operator.local.placements import Placements
from paceline_operator.local.process import Process, last_words
from paceline_operator.local.race import first_of, forever
from paceline_operator.local.store import Store

_RETRY_SECONDS = 2.0  # to look again whether a volume, a secret or a GPU that was missing is there
_DEFAULT_GRACE_SECONDS = 30  # Kubernetes' default of terminationGracePeriodSeconds


@dataclass(frozen=True, slots=True)
class Node:
    """Where pods run: the machine, a folder for their state, and what this process passes on to them.

    claims: the folder in which every `paceline up` of this user claims GPUs.
    """

    machine: machine.Machine
    folder: Path
    claims: Path
    model_store: Path
    environment: Mapping[str, str]
    back_off: BackOff = field(default_factory=BackOff)
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)


def log_file(folder: Path, pod_name: str) -> Path:
    """Where the output of a pod goes, in the node's folder; all its runs, one after the other."""
    return folder / pod_name / "server.log"


class PodRunner:
    """One pod from its placement to the end of its process."""

    def __init__(
        self,
        pod: Manifest,
        store: Store,
        node: Node,
        placements: Placements,
        session: aiohttp.ClientSession,
    ) -> None:
        self._pod = pod
        self._name: str = pod["metadata"]["name"]
        self._store = store
        self._node = node
        self._placements = placements
        self._session = session
        self._log = log_file(node.folder, self._name)
        self._folder = self._log.parent
        self._termination_log = self._folder / "termination-log"
        self._grace_seconds: float = pod["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS)
        self._deleted = asyncio.Event()
        self._process: Process | None = None
        self._state = pods_.PodState()

    @property
    def pid(self) -> int | None:
        """The leader of the container's session; None while nothing runs."""
        return self._process.pid if self._process else None

    def stop(self) -> None:
        """The pod has been deleted: end it gracefully."""
        self._deleted.set()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()

    async def run(self) -> None:
        """Run the pod until it is deleted."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            await first_of(self._live(), self._deleted.wait())
            if self._process is not None:
                await self._process.stop(self._grace_seconds)
        finally:
            self.kill()
            shutil.rmtree(self._folder / "volumes", ignore_errors=True)

    async def _live(self) -> None:
        placement = await self._place()
        self._update(unschedulable=None, started_at=self._node.clock())
        wait: float | None = None
        while True:
            log_start, begun = self._log_size(), self._node.clock()
            self._process = await self._start(placement)
            self._update(container=pods_.Running(begun), started=False, ready=False)
            self._tell("Normal", "Started", f"Started container {names.CONTAINER}")
            code = await self._watch(self._process)
            self._process = None
            ended = pods_.Terminated(code, self._termination_message(code, log_start), begun, self._node.clock())
            wait = self._node.back_off.next(wait, (ended.finished_at - begun).total_seconds())
            await self._rest(ended, wait)

    async def _place(self) -> machine.Placement:
        """Wait for room on the machine, which other processes give back without a word."""
        version = -1
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._store.wait_for_change(version), _RETRY_SECONDS)
            answer = self._placements.take(self._pod)
            if isinstance(answer, machine.Placement):
                return answer
            self._update(unschedulable=answer.message)
            version = self._store.version

    async def _start(self, placement: machine.Placement) -> Process:
        """Create the container; a volume or secret that is missing is waited for."""
        while True:
            try:
                launch = self._launch(placement)
            except CannotStart as error:
                self._report(error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._store.remove("Event", self._event_name(volumes.FAILED_MOUNT))
                return await Process.start(launch.command, launch.env, self._log)

    def _launch(self, placement: machine.Placement) -> container.Launch:
        secrets = secrets_.folder(self._node.environment)
        mounts = volumes.mount(self._pod, self._folder / "volumes", self._node.model_store, self._store.get, secrets)
        self._termination_log.write_bytes(b"")
        extra = {container.TERMINATION_LOG: str(self._termination_log)}
        if placement.gpus:
            extra["CUDA_VISIBLE_DEVICES"] = ",".join(placement.gpus)
        return container.build(self._pod, mounts, self._node.environment, extra)

    def _report(self, error: CannotStart) -> None:
        if error.reason == volumes.FAILED_MOUNT:
            self._update(container=pods_.Waiting("ContainerCreating"))
            known = self._store.get("Event", self._event_name(error.reason))
            if known is None or known["message"] != error.message:
                self._tell("Warning", error.reason, error.message)
        else:
            self._update(container=pods_.Waiting(error.reason, error.message))

    def _tell(self, kind: str, reason: str, message: str) -> None:
        """Tell in an event what the pod's status has no place for; of each reason the last one is kept."""
        name, metadata = self._event_name(reason), self._pod["metadata"]
        self._store.remove("Event", name)
        about = {"apiVersion": "v1", "kind": "Pod", "name": self._name, "uid": metadata["uid"]}
        self._store.apply(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": metadata["namespace"], "ownerReferences": [about]},
                "involvedObject": about,
                "type": kind,
                "reason": reason,
                "message": message,
                "lastTimestamp": timestamp(self._node.clock()),
            }
        )

    def _event_name(self, reason: str) -> str:
        return f"{self._name}.{reason.lower()}"

    async def _watch(self, process: Process) -> int:
        """Until the process has ended, by itself or because a probe said so. Returns its exit status."""
        outcome: int | str = await first_of(process.wait(), self._probe())
        if isinstance(outcome, int):
            return outcome
        self._update(ready=False)
        self._tell("Warning", "Unhealthy", outcome)
        self._tell("Normal", "Killing", f"Container {names.CONTAINER} failed a probe, will be restarted")
        return await process.stop(self._grace_seconds)

    async def _probe(self) -> str:
        """Run the probes until the container has to be restarted. Returns why."""
        startup = probes.Probe.parse("startupProbe", self._pod)
        if startup and (failure := await self._first_verdict(startup)):
            return f"Startup probe failed: {failure}"
        readiness = probes.Probe.parse("readinessProbe", self._pod)
        self._update(started=True, ready=readiness is None)
        return await first_of(self._liveness(), self._readiness(readiness))

    async def _first_verdict(self, startup: probes.Probe) -> str | None:
        async for verdict in probes.watch(startup, self._session):
            if verdict.passing is not None:
                return None if verdict.passing else verdict.message
        raise AssertionError("a probe is watched for ever")

    async def _liveness(self) -> str:
        if liveness := probes.Probe.parse("livenessProbe", self._pod):
            async for verdict in probes.watch(liveness, self._session):
                if verdict.passing is False:
                    return f"Liveness probe failed: {verdict.message}"
        return await forever()

    async def _readiness(self, readiness: probes.Probe | None) -> str:
        if readiness:
            async for verdict in probes.watch(readiness, self._session):
                self._update(ready=bool(verdict.passing))
        return await forever()

    async def _rest(self, ended: pods_.Terminated, seconds: float) -> None:
        """Wait before the next run, as the kubelet calls it."""
        message = f"back-off {seconds:g}s restarting failed container={names.CONTAINER} pod={self._name}"
        resting = pods_.Waiting("CrashLoopBackOff", message) if seconds else ended
        self._update(container=resting, last=ended, started=False, ready=False)
        await asyncio.sleep(seconds)
        self._update(restarts=self._state.restarts + 1)

    def _termination_message(self, code: int, log_start: int) -> str:
        message = self._termination_log.read_text(encoding="utf-8", errors="replace").strip()
        policy = self._pod["spec"]["containers"][0].get("terminationMessagePolicy")
        if not message and code != 0 and policy == "FallbackToLogsOnError":
            return last_words(self._log, log_start)
        return message

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _update(self, **changes: Any) -> None:
        """Take in what has changed and store the pod's status."""
        if changes.get("ready", self._state.ready) != self._state.ready or self._state.changed_at is None:
            changes["changed_at"] = self._node.clock()
        state = replace(self._state, **changes)
        if state != self._state:
            self._state = state
            self._store.set_status("Pod", self._name, pods_.render(state, self._image))

    @property
    def _image(self) -> str:
        return str(self._pod["spec"]["containers"][0].get("image", ""))
