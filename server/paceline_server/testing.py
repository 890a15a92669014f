"""Fakes for tests of the gateway: an engine that follows a script, a small model folder, and a served gateway.

The tokenizer is a real one, byte-level BPE trained on a few lines, with ChatML's markers as special tokens.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline_server.config import ServerConfig, parse
from paceline_server.engine.interface import (
    EmbeddingOutput,
    EmbeddingRequest,
    FinishReason,
    GenerationRequest,
    HotPrefix,
    ModelInfo,
    PrefixList,
    Task,
    TokenOutput,
)
from paceline_server.engine.status import EngineStats, EngineStatus, StartupPhase
from paceline_server.errors import DeadlineExceeded, EngineUnavailable
from paceline_server.gateway.app import create_app
from paceline_server.gateway.state import GATEWAY, Gateway

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TURN = 2
"""Id of `<|im_end|>`: the end-of-sequence token."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "You are a helpful assistant. The capital city of France is Paris.",
    "user system assistant one two three four five six seven",
    "The quick brown fox jumps over the lazy dog, again and again.",
)

Item = int | tuple[int, ...] | asyncio.Event | Exception | FinishReason
Script = Sequence[Item]


def write_model(folder: Path, template: str | None = CHATML) -> Tokenizer:
    """Write the text side of a model into `folder`; returns its tokenizer as the library loads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


@dataclass(eq=False)
class FakeEngine:
    """An engine that answers by a script, within the rules of the real one.

    Args:
        folder: the model's folder.
        script: for each request, what happens: a token, several tokens in one step, a wait for an event, an error, or
            the end for a reason. `max_tokens`, stop tokens and `ignore_eos` hold. A script that runs out ends with the
            end-of-sequence token.

    Attributes:
        requests: all that were submitted to generate; `embedded`: those to embed.
        running: ids of those whose stream is open.
        aborted: ids of those whose stream was left before its end.
        cuts: ids and indexes of single answers that were ended.
        outputs: how many were handed out.
    """

    folder: Path
    script: Callable[[GenerationRequest], Script] | Script = ()
    max_model_len: int = 256
    num_blocks: int = 64
    vocab_size: int = 400
    task: Task = Task.GENERATE
    ready: bool = True
    stats: EngineStats = field(default_factory=EngineStats)
    restarts: int = 0
    step_age: float | None = 0.0
    warnings: tuple[str, ...] = ()
    requests: list[GenerationRequest] = field(default_factory=list)
    embedded: list[EmbeddingRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    cuts: list[tuple[str, int]] = field(default_factory=list)
    outputs: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> EngineStatus:
        """How the engine is now."""
        phases = (
            StartupPhase("start_engine", 2.00000000012),
            StartupPhase("load_weights", 1.0 if self.ready else None),
        )
        reason = "Ready" if self.ready else "Loading"
        return EngineStatus(
            self.ready, reason, "the engine serves" if self.ready else "it loads", phases, self.step_age
        )

    @property
    def info(self) -> ModelInfo | None:
        """What is loaded."""
        return ModelInfo(
            folder=str(self.folder),
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=(END_OF_TURN,),
            num_blocks=self.num_blocks,
            block_size=16,
            dtype="float32",
            device="cpu",
            attention_backend="fake",
            kv_dtype="float32",
            task=self.task,
            dimensions=2 if self.task is Task.EMBED else None,
            warnings=self.warnings,
        )

    @asynccontextmanager
    async def stream(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[TokenOutput]]:
        """Follow the script for one request."""
        if not self.ready:
            raise EngineUnavailable("no engine is ready", retry_after=5.0)
        self.requests.append(request)
        self.running.add(request.request_id)
        self._note()
        finished: list[TokenOutput] = []
        try:
            yield self._outputs(request, finished)
        finally:
            self.running.discard(request.request_id)
            if len(finished) < request.n:
                self.aborted.append(request.request_id)
            self._note()

    async def embed(self, request: EmbeddingRequest) -> EmbeddingOutput:
        """A vector of two numbers for each text: its first token, and how many there are."""
        if not self.ready:
            raise EngineUnavailable("no engine is ready", retry_after=5.0)
        self.embedded.append(request)
        vectors = [struct.pack("<2f", text[0], len(text)) for text in request.inputs]
        return EmbeddingOutput(request.request_id, vectors)

    async def prefixes(self, limit: int) -> PrefixList:
        """One prefix that was asked for twice."""
        return PrefixList("", "fake", (HotPrefix(bytes(16), (5, 6, 7), 2),)[:limit])

    def cut(self, request_id: str, index: int) -> None:
        """End one answer; the script goes on for the others."""
        self.cuts.append((request_id, index))

    async def until(self, condition: Callable[[FakeEngine], bool]) -> None:
        """Return when a submission, an output or an end has made `condition` true."""
        while not condition(self):
            self._changed.clear()
            await self._changed.wait()

    async def _outputs(self, request: GenerationRequest, finished: list[TokenOutput]) -> AsyncIterator[TokenOutput]:
        script = self.script(request) if callable(self.script) else self.script
        generated = 0  # by each answer: all follow the script, one after the other in each step
        for item in [*script, END_OF_TURN]:
            if isinstance(item, asyncio.Event):
                await item.wait()
                continue
            if isinstance(item, Exception):
                raise item
            output = _step(request, item, generated)
            generated += len(output.token_ids)
            for index in range(request.n):
                if (request.request_id, index) in self.cuts:
                    continue
                self.outputs += 1
                self._note()
                if output.finish is not None:
                    finished.append(output)
                yield replace(output, index=index)
            if output.finish is not None:
                return

    def _note(self) -> None:
        self._changed.set()


def _cached(request: GenerationRequest) -> int:
    """At least one token of a prompt is always computed."""
    return min(4, len(request.prompt_token_ids) - 1)


def _step(request: GenerationRequest, item: int | tuple[int, ...] | FinishReason, generated: int) -> TokenOutput:
    """One output, cut at the first token that ends the request."""
    if isinstance(item, FinishReason):
        if item is FinishReason.TIMEOUT and not generated:
            raise DeadlineExceeded("the request's time was over before it could start")
        return TokenOutput(request.request_id, (), item, cached_tokens=_cached(request))
    tokens = item if isinstance(item, tuple) else (item,)
    stops = {*request.stop_token_ids, *(() if request.ignore_eos else (END_OF_TURN,))}
    for count, token in enumerate(tokens, start=1):
        total = generated + count
        if token in stops and total > request.min_tokens:
            return TokenOutput(request.request_id, tokens[:count], FinishReason.STOP, cached_tokens=_cached(request))
        if total == request.max_tokens:
            return TokenOutput(request.request_id, tokens[:count], FinishReason.LENGTH, cached_tokens=_cached(request))
    return TokenOutput(request.request_id, tokens, cached_tokens=_cached(request))


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that answers.

    Attributes:
        url: where it listens.
    """

    client: TestClient[Any, Any]
    gateway: Gateway
    engine: FakeEngine

    @property
    def url(self) -> str:
        """Base URL of the server, for clients of any kind."""
        return str(self.client.make_url("")).rstrip("/")

    def scrape(self) -> dict[str, float]:
        """The samples of /metrics by name and labels, as they are written there."""
        lines = self.gateway.metrics.exposition().decode().splitlines()
        pairs = (line.rsplit(" ", maxsplit=1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def server_config(**gateway: Any) -> ServerConfig:
    """A configuration that serves the model `tiny`; keys of the group `gateway` may be given."""
    engine = {"model_path": "/models/tiny", "served_model_names": ("tiny", "ORG/tiny")}
    return parse({"gateway": {"host": "127.0.0.1", "port": 0, **gateway}, "engine": engine})


@asynccontextmanager
async def served(engine: FakeEngine, config: ServerConfig | None = None, **gateway: Any) -> AsyncIterator[Served]:
    """Serve on a free port until the context is left; it is entered when the tokenizer is loaded.

    Args:
        config: the whole configuration; or keys of the group `gateway` of the default one.
    """
    app = create_app(config or server_config(**gateway), engine)
    async with TestClient(TestServer(app)) as client:
        await app[GATEWAY].texts.loaded.wait()
        yield Served(client, app[GATEWAY], engine)
