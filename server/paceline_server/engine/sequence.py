"""One request on its way through the engine: its tokens, how far its KV is computed, and the blocks it holds.

The schedulers change sequences, and what they ask: `tables`, `preference`, `offload`. There is no prefill or decode
state: a sequence simply has `num_computed` tokens chasing `num_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline_server.engine.batch import SequenceSlice
from paceline_server.engine.blocks import chain_hash, root_hash
from paceline_server.engine.interface import FinishReason, GenerationRequest, TokenOutput


@dataclass(frozen=True, slots=True)
class Parked:
    """Where the KV of a preempted sequence is kept.

    Attributes:
        slots: of host memory, one for each block.
        tokens: whose KV they hold.
    """

    slots: tuple[int, ...]
    tokens: int


@dataclass(slots=True)
class DiskWait:
    """How a sequence gets on that waits for its prefix to come from disk.

    Attributes:
        found: blocks of it that were there at most.
        since: when they were first; None until it looks for them.
    """

    found: int = 0
    since: float | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's record of one request.

    Attributes:
        token_ids: prompt and output so far.
        num_computed: tokens whose KV is in the cache.
        block_table: physical blocks of the logical ones.
        group: names the request for several answers that it is one of; they share the prompt's blocks.
        parked: its KV in host memory, while it waits to be resumed.
        cached_tokens: prompt tokens that the prefix cache brought at the first admission.
        root: digest that those of its blocks start from; of the model and the cache salt.
        max_tokens: output tokens at most: the request's, or what the pool can hold.
        arrival, first_scheduled: times on the engine's clock, in seconds.
        number: the scheduler counts arrivals; breaks ties.
        overtaken: times that an equal of which more was cached went before it (`preference`).
        yields: times that it made room for a more urgent one (`urgency`).
        disk_wait: for its prefix.
        blocked_since: when it was first its turn and it did not fit; None once it runs.
    """

    request: GenerationRequest
    arrival: float
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    number: int = 0
    root: bytes = b""
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    group: str | None = None
    parked: Parked | None = None
    cached_tokens: int | None = None
    first_scheduled: float | None = None
    disk_wait: DiskWait = field(default_factory=DiskWait)
    blocked_since: float | None = None
    preemptions: int = 0
    overtaken: int = 0
    yields: int = 0
    _stop_token_ids: frozenset[int] = field(init=False)
    _digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.root = self.root or root_hash("", self.request.cache_salt)
        eos = frozenset() if self.request.ignore_eos else self.eos_token_ids
        self._stop_token_ids = eos | frozenset(self.request.stop_token_ids)

    @property
    def request_id(self) -> str:
        """Name of the request."""
        return self.request.request_id

    @property
    def expiry(self) -> float | None:
        """When nobody wants the answer any more, on the engine's clock; None is never."""
        return None if self.request.timeout is None else self.arrival + self.request.timeout

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed yet; 1 for a sequence that only decodes."""
        return len(self.token_ids) - self.num_computed

    def slice(self, count: int) -> SequenceSlice:
        """The next `count` tokens as a step computes them; sampled when they reach the end."""
        end = self.num_computed + count
        last = end == self.num_tokens
        too_early_to_stop = last and self.num_output < self.request.min_tokens
        return SequenceSlice(
            token_ids=self.token_ids[self.num_computed : end],
            start=self.num_computed,
            block_table=self.block_table,
            sampling=self.request.sampling if last else None,
            banned_token_ids=sorted(self._stop_token_ids) if too_early_to_stop else (),
            deterministic=self.request.deterministic,
        )

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token; tells whether, and why, it was the last one. A stop token goes before the limit."""
        self.token_ids.append(token_id)
        if token_id in self._stop_token_ids and self.num_output >= self.request.min_tokens:
            return FinishReason.STOP
        if self.num_output >= self.max_tokens:
            return FinishReason.LENGTH
        return None

    def output(self, token_ids: tuple[int, ...], finish: FinishReason | None) -> TokenOutput:
        """What a step brought, as the gateway is told of it."""
        started = self.arrival if self.first_scheduled is None else self.first_scheduled
        return TokenOutput(
            request_id=self.request_id,
            token_ids=token_ids,
            finish=finish,
            cached_tokens=self.cached_tokens or 0,
            queue_seconds=started - self.arrival,
        )

    def take_digests_of(self, other: Sequence) -> None:
        """Know what another answer to the same prompt has computed of its digests, before it has any output."""
        assert self.root == other.root, "digests under another root"
        assert not other.num_output, "digests of another answer's output"
        self._digests = list(other._digests)

    def digests(self, count: int, block_size: int) -> list[bytes]:
        """Chained digests of the first `count` full blocks, computed once."""
        while len(self._digests) < count:
            start = len(self._digests) * block_size
            assert start + block_size <= self.num_tokens, "digest of a block that is not full"
            parent = self._digests[-1] if self._digests else self.root
            self._digests.append(chain_hash(parent, self.token_ids[start : start + block_size]))
        return self._digests[:count]
