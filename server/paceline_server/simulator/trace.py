"""Traces: what was asked of a server, and when. The simulator reads them; benchmarks make and write them.

A file holds one JSON object a line. A trace carries no text: sizes, times and who asked are all that scheduling sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.interface import GenerationRequest, Tier
from paceline_server.errors import InvalidConfiguration

_WORD = (1 << 32) - 1  # token ids of made-up prompts fit into 32 bits
_SAID = {"missing": "is required", "extra_forbidden": "is not a known field"}
_MAX_PRIORITY = 1_000_000  # more than a server takes; seconds that it stands for must stay numbers


class TraceRequest(BaseModel):
    """One line of a trace.

    Attributes:
        arrival: in seconds; only differences count.
        output_tokens: at which the answer ends by itself.
        max_tokens: at which it is cut; None is at `output_tokens`.
        prefix, prefix_tokens: requests of one `prefix` begin with the same tokens, as far as their `prefix_tokens`.
        blocks, block_tokens: names of the prompt's first blocks, each of `block_tokens` tokens; requests begin alike as
            far as the names are. What a server records, in place of a prefix.
        timeout: seconds, as in a request.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    arrival: Annotated[float, Field(ge=0)]
    prompt_tokens: Annotated[int, Field(ge=1)]
    output_tokens: Annotated[int, Field(ge=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    tier: Tier = Tier.STANDARD
    priority: Annotated[int, Field(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)] = 0
    tenant: str = ""
    weight: Annotated[float, Field(gt=0)] = 1.0
    timeout: Annotated[float, Field(gt=0)] | None = None
    prefix: str = ""
    prefix_tokens: Annotated[int, Field(ge=0)] = 0
    blocks: tuple[str, ...] = ()
    block_tokens: Annotated[int, Field(ge=1)] = 16

    @model_validator(mode="after")
    def _prefix_fits(self) -> TraceRequest:
        if self.prefix_tokens > self.prompt_tokens:
            raise ValueError(f"prefix_tokens ({self.prefix_tokens}) is more than prompt_tokens ({self.prompt_tokens})")
        if self.prefix_tokens and not self.prefix:
            raise ValueError("prefix_tokens needs a prefix")
        if self.blocks and self.prefix:
            raise ValueError("a request has blocks or a prefix, not both")
        if (named := len(self.blocks) * self.block_tokens) > self.prompt_tokens:
            raise ValueError(f"blocks of {named} tokens in all are more than prompt_tokens ({self.prompt_tokens})")
        return self

    def request(self, index: int) -> GenerationRequest:
        """The request of the line with that index: unlike all others but for the shared prefix."""
        shared = [hash_word(self.prefix)] * self.prefix_tokens
        shared += [hash_word(block) for block in self.blocks for _ in range(self.block_tokens)]
        own = [index & _WORD] * (self.prompt_tokens - len(shared))
        return GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(shared + own),
            max_tokens=self.max_tokens or self.output_tokens,
            sampling=SamplingParams(seed=index),
            tier=self.tier,
            priority=self.priority,
            tenant=self.tenant,
            weight=self.weight,
            timeout=self.timeout,
        )


def hash_word(text: str) -> int:
    """A token id for a text: equal for equal ones, the same in every process."""
    word = 0
    for byte in text.encode():
        word = (word * 31 + byte) & _WORD
    return word


def read(path: Path) -> list[TraceRequest]:
    """The requests of a file, in order of arrival.

    Raises:
        InvalidConfiguration: the file cannot be read, or a line is no request; the line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() also ends lines inside of strings
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"cannot read {path}: {error}") from None
    requests = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not requests:
        raise InvalidConfiguration(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.arrival)


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a file; values that are the defaults are left out."""
    lines = (json.dumps(request.model_dump(mode="json", exclude_defaults=True)) for request in requests)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _parse(path: Path, number: int, line: str) -> TraceRequest:
    try:
        return TraceRequest.model_validate_json(line)
    except ValidationError as error:
        mistakes = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'line'}: {_SAID.get(one['type'], one['msg'])}"
            for one in error.errors(include_url=False)
        )
        raise InvalidConfiguration(f"{path}, line {number}: {mistakes}") from None
