"""What the gateway knows of the engine: requests in, tokens out, and how the engine is.

`EngineClient` (client.py) implements `Engine` over a socket to the engine process; `testing.FakeEngine` implements it
in memory. Everything here crosses the wire, so it is plain data.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.status import EngineStats, EngineStatus


class FinishReason(StrEnum):
    """Why the engine ended a sequence: OpenAI's words, and TIMEOUT for one that ran out of its own time."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"


class Tier(StrEnum):
    """How urgent a request is, most urgent first: the order in which tiers are served under the policy `slo`."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class Task(StrEnum):
    """What a model is for."""

    GENERATE = "generate"
    EMBED = "embed"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to generate, or several to the same prompt.

    Attributes:
        request_id: unique among the requests under way.
        prompt_token_ids: at least one token; prompt and max_tokens together at most max_model_len.
        max_tokens: output tokens at most, >= 1.
        sampling: how tokens are drawn; the gateway draws a seed where the client gave none.
        stop_token_ids: end the sequence besides the model's own end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end the sequence.
        min_tokens: no end by a stop token before that many output tokens.
        cache_salt: prompts share cached prefixes only under the same salt.
        tier: how urgent the request is (policy `slo`).
        priority: smaller goes first (policy `priority`).
        tenant: on whose account the request runs; tenants share the engine by weight (policy `slo`).
        weight: the tenant's share relative to others, > 0.
        deterministic: bit-equal in any company; only where `ModelInfo.deterministic` says that it can be.
        n: answers, >= 1; each is drawn with a seed of its own, `sampling.seed` plus its index.
        timeout: seconds from the engine's receipt after which nobody wants the answer any more; None is no limit. A
            request that runs out of it while it waits never takes a slot, a running one is stopped.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    cache_salt: str = ""
    tier: Tier = Tier.STANDARD
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    timeout: float | None = None
    n: int = 1
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step brought for one answer to a request.

    Attributes:
        token_ids: the new tokens, in order. Where `finish` is STOP the last one is the stop token: it counts in usage
            and is no text. Where it is TIMEOUT there are none.
        finish: set on the last output of the answer.
        cached_tokens: prompt tokens found in the prefix cache; the same on every output.
        queue_seconds: from the engine's receipt of the request to its first scheduling; the same on every output.
        index: of the answer, from 0 to the request's n - 1.
    """

    request_id: str
    token_ids: Sequence[int]
    finish: FinishReason | None = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    index: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed, each by itself.

    Attributes:
        request_id: unique among the requests under way.
        inputs: at least one text; each of at least one token and at most max_model_len.
        timeout, tenant, weight: as in `GenerationRequest`; tenants take turns by weight.
    """

    request_id: str
    inputs: Sequence[Sequence[int]]
    timeout: float | None = None
    tenant: str = ""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The answer to an embedding request, all texts together.

    Attributes:
        vectors: one an input, in their order: little-endian float32. None where the request ran out of its timeout.
        queue_seconds: from the engine's receipt of the request to the first batch with a text of it.
    """

    request_id: str
    vectors: Sequence[bytes] | None
    queue_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A beginning that many prompts share. It is what clients have asked: only replicas of one service may see it.

    Attributes:
        root: digest of cache salt and model that its blocks' digests start from; the salt itself is not told.
        token_ids: whole blocks.
        uses: prompts that began so, of late.
    """

    root: bytes
    token_ids: Sequence[int]
    uses: int


@dataclass(frozen=True, slots=True)
class PrefixList:
    """The hottest prefixes of a replica.

    Attributes:
        request_id: of the question.
        identity: `ModelInfo.kv_identity`; under another one they are worth nothing.
        prefixes: those first that save most.
    """

    request_id: str
    identity: str
    prefixes: Sequence[HotPrefix]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine loaded; comes with readiness.

    Attributes:
        folder: the model's folder on this machine (tokenizer and chat template are read from it).
        max_model_len: longest sequence in tokens, prompt and output.
        num_blocks: KV blocks of the pool.
        block_size: tokens in a block.
        block_bytes: of a block's keys and values, all layers.
        kv_dtype: number format of keys and values.
        swap_slots: blocks that host memory holds for preempted sequences.
        block_copy_seconds: time to copy a block to host memory or back, as measured.
        offload_slots: blocks that host memory holds of those that the device evicts, after the swap slots.
        offload_files: blocks that the disk holds of those.
        kv_identity: equal where blocks of two engines are: same weights, number format and layout.
        deterministic: whether single requests can be computed bit-equal in any company.
        task: what the model is for; one that embeds has no KV pool.
        dimensions: of an embedding; None for a model that generates.
        warnings: what makes it slower than it could be, each with what to do.
    """

    folder: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    attention_backend: str
    block_bytes: int = 0
    swap_slots: int = 0
    block_copy_seconds: float = 0.0
    kv_dtype: str = ""
    offload_slots: int = 0
    offload_files: int = 0
    kv_identity: str = ""
    deterministic: bool = False
    task: Task = Task.GENERATE
    dimensions: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the KV pool holds: no single sequence can be longer."""
        return self.num_blocks * self.block_size


class Engine(Protocol):
    """The gateway's view of the engine."""

    @property
    def status(self) -> EngineStatus:
        """How the engine is now."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest gauges and totals."""
        ...

    @property
    def restarts(self) -> int:
        """Times that a lost engine was started again."""
        ...

    @property
    def info(self) -> ModelInfo | None:
        """What is loaded; None until the engine was ready for the first time."""
        ...

    def stream(self, request: GenerationRequest) -> AbstractAsyncContextManager[AsyncIterator[TokenOutput]]:
        """Run one request; leaving the context aborts all its answers, and their blocks are back by the next step.

        Raises:
            EngineUnavailable: on entry, where no engine is ready.
            EngineLost: while iterating, where the engine died.
            InvalidRequest: while iterating, where the engine can never serve it.
            Overloaded: while iterating, where the engine says that it would be too late.
            DeadlineExceeded: while iterating, where the request's timeout was over before its first token.
        """
        ...

    async def embed(self, request: EmbeddingRequest) -> EmbeddingOutput:
        """Embed texts; cancelling it aborts the request.

        Raises:
            EngineUnavailable: no engine is ready.
            EngineLost: the engine died meanwhile.
            InvalidRequest: the engine can never serve it.
            DeadlineExceeded: the request's timeout was over before its last text was embedded.
        """
        ...

    def cut(self, request_id: str, index: int) -> None:
        """End one answer of a request under way that asks for several; the others go on."""
        ...

    async def prefixes(self, limit: int) -> PrefixList:
        """The hottest prefixes, for a new replica.

        Raises:
            EngineUnavailable: no engine is ready.
            EngineLost: the engine died meanwhile.
        """
        ...
