"""What a client may send: chat and completion requests as validated models. Called by `chat` and `completions`.

A field is honoured, or its value changes nothing, or it is refused by name; no field is ignored in silence. Fields of
the OpenAI API and of other engines that are not supported yet are declared with the only values that change nothing
(`only`), so that clients which spell out defaults work. docs/reference/api.md lists every field declared here.

All bounds hold before anything is tokenised. A mistake between fields is told of the field to change.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.interface import Tier
from paceline_server.gateway.content import message_text
from paceline_server.gateway.fields import (
    MAX_PRIORITY,
    MAX_TIMEOUT_SECONDS,
    Label,
    RequestFields,
    Strict,
    Unsupported,
    labels,
    mistake,
    one_prompt,
    only,
    stop_strings,
    stop_tokens,
)

MAX_MESSAGES = 2048
MAX_N = 128  # as in the OpenAI reference; gateway.max_n may be less

_GREEDY_BELOW = 1e-5  # dividing logits by less only makes infinities out of them
_LEAST_TOP_P = 1e-9  # stands for 0: the nucleus is then the most likely token alone
_SEED_BITS = 63


class StreamOptions(Strict):
    """How a stream is dressed."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None
    continuous_usage_stats: Annotated[Any, only(False)] = None


class GenerationFields(RequestFields):
    """What chat and completions have in common."""

    max_tokens: Annotated[int | None, Field(ge=1)] = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    stop: Annotated[tuple[str, ...], BeforeValidator(stop_strings)] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(stop_tokens)] = ()
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Label = None
    tier: Annotated[Tier | None, Field(strict=False)] = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    priority: Annotated[int | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None
    timeout: Annotated[float | None, Field(gt=0, le=MAX_TIMEOUT_SECONDS)] = None
    user: Label = None
    n: Annotated[int | None, Field(ge=1, le=MAX_N)] = None
    deterministic: bool | None = None

    frequency_penalty: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    repetition_penalty: Annotated[Any, only(1)] = None
    logit_bias: Annotated[Any, only({})] = None
    logprobs: Annotated[Any, only(False)] = None
    prompt_logprobs: Unsupported = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    structured_outputs: Unsupported = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    echo: Annotated[Any, only(False)] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    truncate_prompt_tokens: Unsupported = None
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1)] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise mistake("is only allowed with stream: true", "stream_options")
        asked = self.output_limit
        if asked is not None and (self.min_tokens or 0) > asked:
            raise mistake(f"must be at most {self.output_limit_field} ({asked})", "min_tokens")
        if self.tier is not None and self.service_tier not in (None, "auto"):
            raise mistake("says the same thing as tier; send one of them", "service_tier")
        return self

    @property
    def output_limit(self) -> int | None:
        """Tokens to generate at most, or None for as many as the context holds."""
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        """The field that `output_limit` came from."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, draw_seed: Callable[[], int] = lambda: secrets.randbits(_SEED_BITS)) -> SamplingParams:
        """How tokens are drawn; a request without a seed gets a random one."""
        temperature = 1.0 if self.temperature is None else self.temperature
        seed = draw_seed() if self.seed is None else self.seed
        return SamplingParams(
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=1.0 if self.top_p is None else max(self.top_p, _LEAST_TOP_P),
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=seed & ((1 << _SEED_BITS) - 1),
        )


class Message(Strict):
    """One turn of a chat. `content` is the joined text of its parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(message_text)] = None
    name: Label = None
    tool_call_id: Label = None
    tool_calls: Annotated[Any, only([])] = None
    function_call: Unsupported = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: Annotated[Any, only([])] = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None:
            raise mistake("is required", "content", kind="missing")
        if self.tool_call_id is not None and self.role != "tool":
            raise mistake("belongs to the role tool", "tool_call_id")
        return self


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None

    top_logprobs: Unsupported = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, only(True, False)] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    chat_template: Unsupported = None
    chat_template_kwargs: Annotated[Any, only({})] = None
    add_generation_prompt: Annotated[Any, only(True)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    documents: Annotated[Any, only([])] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    store: Annotated[Any, only(False)] = None
    metadata: Annotated[Any, BeforeValidator(labels)] = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None

    @model_validator(mode="after")
    def _one_output_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise mistake("says something else than max_tokens; send one of them", "max_completion_tokens")
        return self

    @property
    def output_limit(self) -> int | None:
        """Tokens to generate at most, or None for as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_field(self) -> str:
        """The field that `output_limit` came from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(one_prompt)]

    logprobs: Unsupported = None
    suffix: Unsupported = None
    best_of: Annotated[Any, only(1)] = None
    add_special_tokens: Annotated[Any, only(True)] = None
