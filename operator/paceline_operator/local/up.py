"""`paceline up`: one LLMService on this machine, in this process or detached, and a prompt for it.

What is shown comes from snapshots, and so is the same for a service of this process and for a detached one. Called by
`commands.up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.local import columns, machine, manifest, room, secrets
from paceline_operator.local.cluster import key_of
from paceline_operator.local.detached import Detached
from paceline_operator.local.errors import AlreadyRunning, NotSupportedLocally, StartFailed
from paceline_operator.local.invocation import paceline
from paceline_operator.local.outlook import has_run, hopeless, unmendable
from paceline_operator.local.progress import Progress, serves
from paceline_operator.local.prompt import ask, example
from paceline_operator.local.race import first_of
from paceline_operator.local.served import Served
from paceline_operator.local.signals import Signals
from paceline_operator.local.state import Snapshot, StateFolder
from paceline_operator.spec import parse_spec

_TICK_SECONDS = 0.1
_NUMBERS_SECONDS = 5.0  # two looks of the autoscaler: by then the request of the prompt is in the status
_KILLED = 130  # the shell's status for what Ctrl-C has ended


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the user asks for. `port` None is the Service's own; `secrets` None the folder of the environment."""

    file: Path
    host: str = "127.0.0.1"
    port: int | None = None
    cpu: bool = False
    prompt: str | None = None
    detach: bool = False
    secrets: Path | None = None


async def up(options: UpOptions, output: TextIO = sys.stdout, environment: Mapping[str, str] = os.environ) -> int:
    """Run the service of a file. Returns the exit code.

    Raises:
        LocalError: it cannot be run, does not become ready, or the prompt is not answered.
    """
    if sys.platform != "linux":
        raise NotSupportedLocally(
            "paceline up needs Linux: it relies on /proc and PR_SET_PDEATHSIG to leave no server behind"
        )
    if options.secrets is not None:
        environment = {**environment, secrets.VARIABLE: str(options.secrets.absolute())}
    service = manifest.load(options.file, cpu=options.cpu, secrets=secrets.folder(environment))
    folder = StateFolder.of(key_of(service), environment)
    key = secrets.plain_key(parse_spec(service["spec"]), secrets.folder(environment))
    session = _Session(options, service, Progress(output), key)
    if running := folder.read():
        return await session.visit(folder, running)
    session.introduce(await machine.detect())
    if options.detach:
        return await session.detach(folder)
    return await session.host(folder, environment)


class _Session:
    """One call of `paceline up`."""

    def __init__(self, options: UpOptions, service: Manifest, progress: Progress, key: str | None) -> None:
        self._options = options
        self._service = service
        self._name: str = service["metadata"]["name"]
        self._progress = progress
        self._key = key

    def introduce(self, here: machine.Machine) -> None:
        """Say what is about to be run, and what of it is different on this machine."""
        self._progress.say(f"{self._name}: {self._service['spec']['model']}")
        for note in (*manifest.notes(self._service), room.note(self._service, here)):
            if note:
                self._progress.say(f"  note: {note}")

    async def visit(self, folder: StateFolder, running: Snapshot) -> int:
        """The service is up already: ask it, or leave it as it is."""
        stop = f"`{paceline('down', self._name)}` stops it"
        if _without_replicas(running.service["spec"]) != _without_replicas(self._service["spec"]):
            raise AlreadyRunning(f"{self._name} is up already (process {running.pid}) with another spec: {stop}")
        if not (self._options.detach or self._options.prompt):
            raise AlreadyRunning(f"{self._name} is up already at {running.url} (process {running.pid}): {stop}")
        self._progress.say(f"{self._name} is up already at {running.url} (process {running.pid}); {stop}")
        self._progress.leave_out(running)
        await self._use(lambda: _still_there(folder, self._name))
        await self._say_how_to_use(running)
        return 0

    async def detach(self, folder: StateFolder) -> int:
        """Start it in a process of its own, and leave that running when the service is ready."""
        child = Detached.start(folder, self._child_arguments())
        try:
            async with Signals() as signals:
                stopped = await first_of(
                    _returning(True, signals.first.wait()), _returning(False, self._use(child.read))
                )
        except BaseException:
            await child.stop()
            raise
        if stopped:
            self._progress.say("stopping")
            await child.stop()
            return _KILLED
        if snapshot := folder.read():
            await self._say_how_to_use(snapshot)
        self._progress.say(f"\nIt goes on serving.\n  {paceline('logs', self._name)}\n  {paceline('down', self._name)}")
        return 0

    async def host(self, folder: StateFolder, environment: Mapping[str, str]) -> int:
        """Run it in this process until it is told to end, or until the prompt is answered."""
        port = names.PORT if self._options.port is None else self._options.port
        with folder.lock():
            served = await Served.open(self._service, folder, (self._options.host, port), environment)
            running = asyncio.create_task(served.run())
            try:
                async with Signals() as signals:
                    try:
                        await first_of(
                            _returning(True, signals.first.wait()), self._attend(served), _until_done(running)
                        )
                    finally:
                        killed = await self._drain(served, signals, running)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        return _KILLED if killed else 0

    async def _attend(self, served: Served) -> bool:
        """Show the service while it runs; with a prompt, until it is answered."""
        if self._options.prompt is not None:
            await self._use(served.snapshot)
            return True
        await self._until_ready(served.snapshot, patient=True)
        await self._say_how_to_use(served.snapshot())
        self._progress.say("\nCtrl-C drains and stops it.")
        while True:
            self._progress.show(served.snapshot())
            await asyncio.sleep(_TICK_SECONDS)

    async def _drain(self, served: Served, signals: Signals, running: asyncio.Task[None]) -> bool:
        """End the servers gracefully, at once after a second signal. Returns whether that came."""
        if running.done():
            return False  # a fault of ours: its traceback says more than we could
        asked = signals.first.is_set()
        self._progress.say("draining; Ctrl-C again stops at once, and cuts what runs" if asked else "stopping")
        draining = asyncio.create_task(served.drain())
        killed = await first_of(_returning(True, signals.second.wait()), _returning(False, asyncio.shield(draining)))
        if killed:
            served.kill()
            await draining
        self._progress.say("stopped")
        return killed

    async def _use(self, read: Callable[[], Snapshot | None]) -> None:
        """Wait for the service; then ask the prompt, if there is one, and show the table."""
        snapshot = await self._until_ready(read, patient=False)
        if self._options.prompt is None:
            return
        self._progress.say(f"\n> {self._options.prompt}")
        answer = await ask(snapshot.url, self._name, self._options.prompt, self._progress.stream, self._key)
        self._progress.say(f"\n\n{answer.summary()}\n")
        snapshot = await self._until_measured(read, snapshot)
        self._progress.say(columns.table([snapshot.service], datetime.now(UTC)))

    async def _until_ready(self, read: Callable[[], Snapshot | None], *, patient: bool) -> Snapshot:
        """Show how it starts. Who is `patient` is shown failures as well, and lets servers be restarted.

        Raises:
            StartFailed: waiting, for who is patient also restarting, would not make it ready.
        """
        give_up = unmendable if patient else hopeless
        while True:
            if snapshot := read():
                if reason := give_up(snapshot):
                    log = f"\n`{paceline('logs', self._name)}` shows what it has logged" if has_run(snapshot) else ""
                    raise StartFailed(f"{self._name} does not start: {reason}{log}")
                self._progress.show(snapshot, failures=patient)
                if serves(snapshot):
                    return snapshot
            await asyncio.sleep(_TICK_SECONDS)

    async def _until_measured(self, read: Callable[[], Snapshot | None], snapshot: Snapshot) -> Snapshot:
        """Wait for the status to hold the answered request; give up after a while, the table is not worth more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NUMBERS_SECONDS):
                while snapshot.service["status"].get("queueDepth") != 0 or "ttftP95" not in snapshot.service["status"]:
                    await asyncio.sleep(_TICK_SECONDS)
                    snapshot = read() or snapshot
        return snapshot

    async def _say_how_to_use(self, snapshot: Snapshot) -> None:
        self._progress.say(f"\n{await example(snapshot.url, self._name, self._key)}")

    def _child_arguments(self) -> list[str]:
        options = self._options
        arguments = [str(options.file.absolute()), "--host", options.host]
        if options.port is not None:
            arguments += ["--port", str(options.port)]
        if options.secrets is not None:
            arguments += ["--secrets", str(options.secrets.absolute())]
        return arguments + (["--cpu"] if options.cpu else [])


def _without_replicas(spec: Manifest) -> Manifest:
    """A specification without what an autoscaler may have changed."""
    return {key: value for key, value in spec.items() if key != "replicas"}


def _still_there(folder: StateFolder, name: str) -> Snapshot:
    snapshot = folder.read()
    if snapshot is None:
        raise StartFailed(f"{name} was stopped meanwhile")
    return snapshot


async def _until_done(task: asyncio.Task[None]) -> bool:
    """Wait for a task without taking it along when this is cancelled."""
    await asyncio.shield(task)
    return True


async def _returning(result: bool, awaitable: Awaitable[object]) -> bool:
    await awaitable
    return result
