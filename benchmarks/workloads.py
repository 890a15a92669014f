"""Seeded requests for the load generator: prompt texts of exact token counts, with output lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

WORDS = (
    "river mountain window engine garden letter summer bridge market winter paper kitchen doctor silver forest music "
    "teacher island morning station village history captain butter diamond shadow planet ticket basket candle"
).split()


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to ask for; end-of-sequence tokens are to be ignored, so exactly `max_tokens` come back."""

    prompt: str
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of requests."""

    name: str
    requests: tuple[Request, ...]

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests together."""
        return sum(request.max_tokens for request in self.requests)


def mixed(model: Path, count: int, *, seed: int = 0) -> Workload:
    """`count` requests with prompts of 33..512 tokens (median about 150) and outputs of 16..256 (median about 45).

    Lengths are log-normal, clamped; texts are random words, so that no two prompts share a prefix.
    """
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    requests = []
    for _ in range(count):
        prompt_tokens = _length(rng, median=150, spread=0.7, low=33, high=512)
        requests.append(
            Request(
                prompt=_text(rng, tokenizer, prompt_tokens),
                prompt_tokens=prompt_tokens,
                max_tokens=_length(rng, median=45, spread=0.8, low=16, high=256),
            )
        )
    return Workload(f"mixed-{count}", tuple(requests))


def reworded(model: Path, base: Workload, *, seed: int) -> Workload:
    """The lengths of `base` in other words: a server that has seen `base` finds none of it in its caches."""
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    requests = (replace(request, prompt=_text(rng, tokenizer, request.prompt_tokens)) for request in base.requests)
    return Workload(f"{base.name}-reworded-{seed}", tuple(requests))


def shared_prefix(model: Path, base: Workload, *, tokens: int = 768, seed: int = 1) -> Workload:
    """The requests of `base` behind one prefix of `tokens` tokens that all of them share, as a system prompt is."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prefix = _text(random.Random(seed), tokenizer, tokens)
    # Counted anew: a word behind a space may be another token than at the begin of a text.
    prompts = [f"{prefix} {request.prompt}" for request in base.requests]
    counts = [len(tokenizer.encode(prompt).ids) for prompt in prompts]
    requests = (
        Request(prompt, count, request.max_tokens)
        for prompt, count, request in zip(prompts, counts, base.requests, strict=True)
    )
    return Workload(f"{base.name}-behind-{tokens}", tuple(requests))


def long_prompts(model: Path, count: int, *, low: int = 4000, high: int = 7000, output: int = 64) -> Workload:
    """`count` requests with prompts of `low`..`high` tokens, spread evenly, and `output` tokens each."""
    rng = random.Random(2)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    requests = []
    for number in range(count):
        prompt_tokens = low + (high - low) * number // max(1, count - 1)
        requests.append(Request(_text(rng, tokenizer, prompt_tokens), prompt_tokens, output))
    rng.shuffle(requests)
    return Workload(f"long-{count}", tuple(requests))


def alone(model: Path, count: int, *, prompt: int = 150, output: int = 128) -> Workload:
    """`count` equally long requests, for one client."""
    rng = random.Random(3)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    requests = (Request(_text(rng, tokenizer, prompt), prompt, output) for _ in range(count))
    return Workload(f"alone-{count}", tuple(requests))


def warm_up(model: Path) -> Workload:
    """Two requests for two clients, of texts that no other workload has: caches of prefixes learn nothing from them."""
    rng = random.Random(4)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return Workload("warm-up", tuple(Request(_text(rng, tokenizer, 150), 150, 32) for _ in range(2)))


def _length(rng: random.Random, *, median: float, spread: float, low: int, high: int) -> int:
    return max(low, min(high, round(median * rng.lognormvariate(0.0, spread))))


def _text(rng: random.Random, tokenizer: Tokenizer, tokens: int) -> str:
    """Random words that encode to exactly `tokens` tokens."""
    words = rng.choices(WORDS, k=tokens * 2 // 3)  # a word has one token and a half, or less
    while (count := len(tokenizer.encode(text := " ".join(words)).ids)) != tokens:
        if count > tokens:
            del words[-3:]
        words += rng.choices(WORDS, k=max(1, (tokens - count) // 2))
    return text
