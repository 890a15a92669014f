"""The gateway's end: starts the engine process, keeps it alive, and turns frames into one stream per request.

`cli` runs `EngineClient.supervise` beside the gateway. An engine that dies after it was ready is started again, its
requests end with `EngineLost`, and `status` is not ready meanwhile. An engine that cannot start, or dies soon after
each start (`restarts`), ends the server with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import monotonic
from uuid import uuid4

from paceline_server.config import ServerConfig
from paceline_server.engine.child import describe_exit, engine_process, see_off
from paceline_server.engine.interface import (
    EmbeddingOutput,
    EmbeddingRequest,
    GenerationRequest,
    ModelInfo,
    PrefixList,
    TokenOutput,
)
from paceline_server.engine.restarts import LASTING_SECONDS, Restarts, start_budget
from paceline_server.engine.status import EngineStats, EngineStatus, StartupPhase
from paceline_server.engine.streams import Items, Streams, embedding, prefix_list, refusal, tokens
from paceline_server.engine.wire import (
    Abort,
    AskPrefixes,
    Configure,
    Decoder,
    Embed,
    Embedded,
    Failed,
    Message,
    Phase,
    Prefixes,
    Ready,
    Refused,
    Step,
    Submit,
    encode,
)
from paceline_server.errors import (
    STARTUP_ERRORS,
    EngineFailed,
    EngineUnavailable,
    StartupError,
)

log = logging.getLogger("paceline.client")

_RETRY_AFTER_SECONDS = 5.0


class EngineClient:
    """Implements `Engine` over a socket pair to an engine process.

    Args:
        config: the whole configuration; the process gets a copy as its first frame.
        command: what to run, without the socket's number. For tests.
    """

    def __init__(self, config: ServerConfig, command: tuple[str, ...] | None = None) -> None:
        self._config = config
        self._command = command or (sys.executable, "-m", "paceline_server.engine.process")
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._streams = Streams()
        self._phases: dict[str, StartupPhase] = {}
        self._failure: Failed | None = None
        self._first_start: float | None = None  # seconds
        self._ready_since: float | None = None
        self._last_sign: float | None = None
        self._info: ModelInfo | None = None
        self._stats = EngineStats()
        self._restarts = 0

    @property
    def status(self) -> EngineStatus:
        """How the engine is now."""
        ready = self._ready_since is not None
        if ready:
            reason, message = "Ready", "the engine serves"
        elif self._info is not None:
            reason, message = "EngineRestarting", "the engine process was lost and is being started again"
        else:
            reason, message = "Loading", "the engine starts"
        age = monotonic() - self._last_sign if ready and self._last_sign is not None else None
        return EngineStatus(ready, reason, message, tuple(self._phases.values()), age)

    @property
    def stats(self) -> EngineStats:
        """The newest gauges and totals; zeros while no engine runs."""
        return self._stats

    @property
    def restarts(self) -> int:
        """Times that a lost engine was started again."""
        return self._restarts

    @property
    def info(self) -> ModelInfo | None:
        """What is loaded; None until the engine was ready for the first time."""
        return self._info

    async def supervise(self) -> None:
        """Start the engine and keep it running until cancelled; the process is gone when this returns.

        Raises:
            StartupError: the first start failed, or several in a row failed or served for a short time only.
        """
        restarts = Restarts()
        while True:
            pause = restarts.pause_after(await self._run_once())
            if pause is None:
                raise self._why_hopeless(restarts.short_lives)
            self._restarts += 1
            await asyncio.sleep(pause)

    @asynccontextmanager
    async def stream(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[TokenOutput]]:
        """Run one request; leaving the context aborts it.

        Raises:
            EngineUnavailable: on entry, where no engine is ready.
            EngineLost: while iterating, where the engine died.
            InvalidRequest: while iterating, where the engine can never serve it.
            Overloaded: while iterating, where the engine says that it would be too late.
            DeadlineExceeded: while iterating, where the request's timeout was over before its first token.
        """
        async with self._submitted(request.request_id, Submit(request), request.n) as items:
            yield tokens(items, request.n)

    async def embed(self, request: EmbeddingRequest) -> EmbeddingOutput:
        """Embed texts; cancelling it aborts the request.

        Raises:
            EngineUnavailable: no engine is ready.
            EngineLost: the engine died meanwhile.
            InvalidRequest: the engine can never serve it.
            DeadlineExceeded: the request's timeout was over before its last text was embedded.
        """
        async with self._submitted(request.request_id, Embed(request)) as items:
            return await embedding(items)

    async def prefixes(self, limit: int) -> PrefixList:
        """The hottest prefixes, for a new replica.

        Raises:
            EngineUnavailable: no engine is ready.
            EngineLost: the engine died meanwhile.
        """
        name = f"prefixes {uuid4().hex}"
        async with self._submitted(name, AskPrefixes(name, limit)) as items:
            return await prefix_list(items)

    @asynccontextmanager
    async def _submitted(
        self, request_id: str, message: Submit | Embed | AskPrefixes, answers: int = 1
    ) -> AsyncIterator[Items]:
        """Send a request, and give out what comes back; leaving the context aborts it."""
        writer = self._writer
        if self._ready_since is None or writer is None:
            raise EngineUnavailable(
                f"no engine is ready yet: {self.status.message}; try again", retry_after=_RETRY_AFTER_SECONDS
            )
        items = self._streams.open(request_id, answers)
        writer.write(encode(message))
        try:
            yield items
        finally:
            if self._streams.close(request_id) and not writer.is_closing():
                writer.write(encode(Abort(request_id)))

    def cut(self, request_id: str, index: int) -> None:
        """End one answer of a request under way that asks for several; the others go on."""
        under_way = self._streams.cut(request_id, index)
        if under_way and self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(Abort(request_id, index)))

    async def _run_once(self) -> float | None:
        """One life of the engine process; returns for how many seconds it served, None where it never did."""
        self._phases = {}
        self._note(StartupPhase("start_engine"))
        self._failure = None
        begun = monotonic()
        async with engine_process(self._command, self._config.engine) as (process, ours):
            self._process = process
            watch = self._watch_restart(process)
            try:
                reader, self._writer = await asyncio.open_unix_connection(sock=ours)
                self._writer.write(encode(Configure(self._config.model_dump_json(exclude={"tenants"}))))
                await self._read(reader, begun)
                served = None if self._ready_since is None else monotonic() - self._ready_since
            finally:
                if watch is not None:
                    watch.cancel()
                self._lose()
            await see_off(process)
        return served

    def _watch_restart(self, process: asyncio.subprocess.Process) -> asyncio.TimerHandle | None:
        """Kill a process that hangs while it starts again. The first start is watched from outside, by its probe."""
        if self._first_start is None:
            return None
        budget = start_budget(self._first_start)

        def kill() -> None:
            if self._ready_since is None:
                log.error("engine process is not ready %.0f s after its start: it is killed", budget)
                process.kill()

        return asyncio.get_running_loop().call_later(budget, kill)

    async def _read(self, reader: asyncio.StreamReader, begun: float) -> None:
        decoder = Decoder()
        with suppress(ConnectionResetError):  # a killed process may reset the socket instead of closing it
            while data := await reader.read(1 << 20):
                for message in decoder.feed(data):
                    self._receive(message, begun)

    def _receive(self, message: Message, begun: float) -> None:
        self._last_sign = monotonic()
        match message:
            case Step(outputs, stats):
                self._stats = stats
                for output in outputs:
                    self._streams.deliver(output)
            case Embedded(embedded, stats):
                self._stats = stats
                for answer in embedded:
                    self._streams.end(answer.request_id, answer)
            case Prefixes(found):
                self._streams.end(found.request_id, found)
            case Phase(phase):
                self._end_start_engine(begun)
                self._note(phase)
            case Ready(info):
                self._end_start_engine(begun)
                self._info, self._ready_since = info, monotonic()
                self._first_start = self._first_start or self._ready_since - begun
                described = _describe(info, self._config.engine.quantization)
                log.info("ready after %.1f s: %s", monotonic() - begun, described)
            case Failed():
                self._failure = message
            case Refused(request_id, text, retry_after):
                self._streams.end(request_id, refusal(text, retry_after))
            case _:
                raise AssertionError(f"the engine sent {type(message).__name__}")

    def _note(self, phase: StartupPhase) -> None:
        self._phases[phase.name] = phase
        if phase.seconds is not None:
            log.info("start-up phase %s took %.2f s", phase.name, phase.seconds)

    def _end_start_engine(self, begun: float) -> None:
        if self._phases["start_engine"].seconds is None:
            self._note(StartupPhase("start_engine", monotonic() - begun))

    def _lose(self) -> None:
        """Forget a process that says nothing more, ended or not; every open stream ends with an error."""
        self._ready_since = None
        self._stats = EngineStats()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._streams.lose()

    def _why_hopeless(self, short_lives: int) -> StartupError:
        """Why the engine is not started again: its own words, or how the process ended."""
        if self._failure is not None:
            return STARTUP_ERRORS.get(self._failure.reason, EngineFailed)(self._failure.message)
        assert self._process is not None
        end = describe_exit(self._process.returncode)
        if short_lives == 1:
            return EngineFailed(f"the engine process ended while starting: {end}")
        served = f"before it had served for {LASTING_SECONDS:.0f} s"
        return EngineFailed(f"the engine process ended {short_lives} times in a row {served}; the last time: {end}")


def _describe(info: ModelInfo, quantization: str | None) -> str:
    weights = f"{info.dtype}{', quantized to ' + quantization if quantization else ''}"
    place = f"{weights} on {info.device} (attention {info.attention_backend})"
    return f"{info.folder} in {place}, a KV cache of {info.kv_capacity_tokens} tokens"
