"""The engine's side of the wire: receives commands, drives the step loop, sends what came out.

`process` runs it with the real model; tests run it with a fake one. One thread does everything: commands are drained
once per step, so the step loop shares the interpreter lock with nobody.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from paceline_server.config import ServerConfig
from paceline_server.engine.admission import Refusal
from paceline_server.engine.batch import Encoder, Runner
from paceline_server.engine.batchers import Batcher, Batching, delay_window
from paceline_server.engine.core import EngineCore
from paceline_server.engine.embedder import EmbeddingCore
from paceline_server.engine.handover import take_over
from paceline_server.engine.interface import ModelInfo, PrefixList
from paceline_server.engine.offload import BlockFiles
from paceline_server.engine.recorder import TraceRecorder
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.status import StartupPhase
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
from paceline_server.errors import EngineFailed, InvalidConfiguration, StartupError

_HEARTBEAT_SECONDS = 1.0

log = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that generates, warmed up.

    Attributes:
        files: its KV blocks on disk, where it has any.
        on_idle: what it would do when there is nothing else to do, if anything.
    """

    runner: Runner
    info: ModelInfo
    files: BlockFiles | None = None
    on_idle: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A model that embeds, warmed up."""

    encoder: Encoder
    info: ModelInfo


Core = EngineCore | EmbeddingCore

Loader = Callable[[ServerConfig, Callable[[StartupPhase], None]], Loaded | LoadedEncoder]
"""Loads a model and reports each phase at its begin and its end.

Raises:
    StartupError: the model cannot be served; the error's reason and text go to the gateway.
"""


class GatewayGone(Exception):
    """The other end of the socket is closed: nobody is left to serve."""


class Wire:
    """The engine's end of the socket: blocking sends, receives with a timeout."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = Decoder()

    def send(self, message: Message) -> None:
        """Send one frame; a gateway that reads slowly slows the engine down instead of filling memory.

        Raises:
            GatewayGone: the gateway closed the socket.
        """
        try:
            self._connection.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            raise GatewayGone from None

    def receive(self, timeout: float) -> list[Message]:
        """All messages that have arrived; waits up to `timeout` seconds for the first.

        Raises:
            GatewayGone: the gateway closed the socket.
        """
        messages: list[Message] = []
        while select.select([self._connection], [], [], 0.0 if messages else timeout)[0]:
            data = self._connection.recv(1 << 20)
            if not data:
                raise GatewayGone
            messages += self._decoder.feed(data)
        return messages


def run(wire: Wire, loader: Loader) -> int:
    """Load and serve until the gateway is gone; returns the exit code."""
    try:
        config = _receive_config(wire)
        try:
            recorder = _recorder(config)
            loaded = loader(config, lambda phase: wire.send(Phase(phase)))
            if recorder is not None and isinstance(loaded, LoadedEncoder):
                raise InvalidConfiguration("observability.trace_path: this model embeds, and has no steps to trace")
        except StartupError as error:
            wire.send(Failed(error.reason, str(error)))
            return error.exit_code
        except GatewayGone:
            raise
        except Exception as error:  # the process ends with it: whatever it is, its text must reach the pod's status
            log.exception("the model could not be loaded")
            wire.send(Failed(EngineFailed.reason, f"{type(error).__name__} while loading the model: {error}"))
            return EngineFailed.exit_code
        core = _core(loaded, config)
        if isinstance(core, EngineCore) and config.kv_cache.handover.peer is not None:
            _take_over(core, config, wire)
        wire.send(Ready(loaded.info))
        serve(wire, core, recorder, loaded.on_idle if isinstance(loaded, Loaded) else None)
    except GatewayGone:
        log.info("the gateway is gone: ending")
    return 0


def _take_over(core: EngineCore, config: ServerConfig, wire: Wire) -> None:
    begun = monotonic()
    wire.send(Phase(StartupPhase("handover")))
    take_over(core, config.kv_cache.handover)
    wire.send(Phase(StartupPhase("handover", monotonic() - begun)))


def serve(
    wire: Wire, core: Core, recorder: TraceRecorder | None = None, on_idle: Callable[[], None] | None = None
) -> None:
    """The loop: drain commands, step, send what came out; a heartbeat when idle.

    Args:
        recorder: is told what was asked, where the core generates.
        on_idle: called when nothing has come for the time of a heartbeat, and nothing is to be done.

    Raises:
        GatewayGone: the gateway closed the socket.
    """
    while True:
        due = core.due_in()
        messages = wire.receive(_HEARTBEAT_SECONDS if due is None else min(due, _HEARTBEAT_SECONDS))
        for message in messages:
            _apply(message, wire, core, recorder)
        if on_idle is not None and due is None and not messages:
            on_idle()
        step = _step(core)
        if recorder is not None and isinstance(step, Step):
            recorder.saw(step.outputs)
        wire.send(step)


def _step(core: Core) -> Message:
    if isinstance(core, EmbeddingCore):
        return Embedded(tuple(core.step()), core.stats())
    return Step(tuple(core.step()), core.stats())


def _apply(message: Message, wire: Wire, core: Core, recorder: TraceRecorder | None) -> None:
    if isinstance(message, Submit | Embed):
        refusal = _submit(message, core)
        if refusal is not None:
            wire.send(Refused(message.request.request_id, refusal.message, refusal.retry_after))
        elif recorder is not None and isinstance(message, Submit):
            recorder.submitted(message.request)
    elif isinstance(message, AskPrefixes):
        wire.send(Prefixes(_prefixes(message, core)))
    elif isinstance(message, Abort):
        _abort(message, core)
        if recorder is not None:
            recorder.aborted(message.request_id, message.index)
    else:
        raise AssertionError(f"the gateway sent {type(message).__name__}")


def _prefixes(message: AskPrefixes, core: Core) -> PrefixList:
    if isinstance(core, EngineCore):
        return core.hot_prefixes(message.request_id, message.limit)
    return PrefixList(message.request_id, core.info.kv_identity, ())


def _abort(message: Abort, core: Core) -> None:
    if isinstance(core, EngineCore):
        core.abort(message.request_id, message.index)
    else:
        core.abort(message.request_id)


def _submit(message: Submit | Embed, core: Core) -> Refusal | None:
    if isinstance(message, Submit) and isinstance(core, EngineCore):
        return core.submit(message.request)
    if isinstance(message, Embed) and isinstance(core, EmbeddingCore):
        return core.submit(message.request)
    raise AssertionError(f"the gateway sent {type(message).__name__} to a model that {core.info.task.value}s")


def _core(loaded: Loaded | LoadedEncoder, config: ServerConfig) -> Core:
    limits, batching = _limits(config), _batching(config)
    if isinstance(loaded, LoadedEncoder):
        window = delay_window(Batching(Batcher.DYNAMIC, max_delay=batching.max_delay), limits.max_batch_size)
        return EmbeddingCore(loaded.encoder, loaded.info, limits, window)
    return EngineCore(
        loaded.runner,
        loaded.info,
        limits,
        config.scheduling,
        prefix_caching=config.kv_cache.prefix_caching,
        batching=batching,
        files=loaded.files,
    )


def _recorder(config: ServerConfig) -> TraceRecorder | None:
    settings = config.observability
    if settings.trace_path is None:
        return None
    return TraceRecorder(Path(settings.trace_path), int(settings.trace_max_mb * 1e6), config.kv_cache.block_size_tokens)


def _limits(config: ServerConfig) -> SchedulerLimits:
    return SchedulerLimits(
        max_batch_size=config.batching.max_batch_size,
        max_tokens_in_batch=config.batching.max_tokens_in_batch,
        max_bypass_seconds=config.scheduling.max_bypass_ms / 1e3,
    )


def _batching(config: ServerConfig) -> Batching:
    batching = config.batching
    return Batching(Batcher(batching.kind), batching.packed, batching.max_queue_delay_us / 1e6)


def _receive_config(wire: Wire) -> ServerConfig:
    while True:
        for message in wire.receive(timeout=60.0):
            assert isinstance(message, Configure), "the first message is the configuration"
            return ServerConfig.model_validate_json(message.config)
