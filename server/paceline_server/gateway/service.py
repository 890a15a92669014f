"""One generating request from head to last byte. Used by `app` for chat and completions.

Everything that can be known up front is answered before a stream's head goes out (`reception`), so that a streamed and
a whole answer fail alike; the head goes out with the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from aiohttp import web

from paceline_server.engine.interface import GenerationRequest, ModelInfo, Task
from paceline_server.errors import ContextLengthExceeded, InvalidRequest
from paceline_server.gateway.answers import Endpoint, Head
from paceline_server.gateway.assembly import TextAssembly
from paceline_server.gateway.context import output_tokens, refuse_beyond_batch, refuse_limit_beyond_context
from paceline_server.gateway.detokenizer import Detokenizer
from paceline_server.gateway.exchange import EXCHANGE, Exchange
from paceline_server.gateway.generation import Meter, generate
from paceline_server.gateway.model_text import ModelText
from paceline_server.gateway.reception import Outputs, fields_of, receive
from paceline_server.gateway.requests import GenerationFields
from paceline_server.gateway.state import GATEWAY, Gateway
from paceline_server.gateway.tenants import Tenant
from paceline_server.gateway.urgency import TIMEOUT_HEADER, Urgency, urgency
from paceline_server.gateway.writers import Streamed, Whole


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that was found in order. It keeps token ids and no text: thousands may wait."""

    request: GenerationRequest
    assemblies: list[TextAssembly]
    head: Head
    stream: bool
    include_usage: bool
    asked: int | None  # output tokens by the client's own limit

    @property
    def outputs(self) -> Outputs:
        """What it may generate."""
        return Outputs(self.asked, self.request.max_tokens, self.request.n)


async def answer(request: web.Request, endpoint: Endpoint[Any]) -> web.StreamResponse:
    """Serve one request of a generating endpoint.

    Raises:
        RequestError: it is refused, or fails; the middleware answers, also in the middle of a stream.
    """
    gateway = request.app[GATEWAY]

    async def prepare(body: bytes, text: ModelText, tenant: Tenant) -> _Job:
        fields = await fields_of(gateway, body, endpoint.fields)
        return await _prepare(request, endpoint, fields, text, tenant)

    async def compute(job: _Job, on_start: Callable[[], None]) -> web.StreamResponse:
        meter = Meter(request[EXCHANGE], gateway.metrics, on_start)
        writer = _writer(request, endpoint, job)
        await generate(gateway.engine, job.request, job.assemblies, meter, writer.take)
        return await writer.finish()

    return await receive(request, Task.GENERATE, prepare, compute)


async def _prepare(
    request: web.Request, endpoint: Endpoint[Any], fields: GenerationFields, text: ModelText, tenant: Tenant
) -> _Job:
    gateway, exchange = request.app[GATEWAY], request[EXCHANGE]
    _refuse_many_answers(fields.n or 1, gateway.config.gateway.max_n)
    _refuse_indeterminate(fields, text.info)
    refuse_limit_beyond_context(fields.output_limit, fields.output_limit_field, text.info)
    refuse_limit_beyond_context(fields.min_tokens, "min_tokens", text.info)
    text.refuse_unknown(fields.stop_token_ids, "stop_token_ids")
    urgent = urgency(fields, request.headers.get(TIMEOUT_HEADER), gateway.config.scheduling, tenant.config)
    prompt = await endpoint.encode(fields, text)
    exchange.prompt_tokens = len(prompt)
    max_tokens = _fit(len(prompt), fields, endpoint, text, gateway)
    fingerprint = gateway.fingerprint(text.info)
    return _Job(
        request=_request(exchange, fields, prompt, max_tokens, tenant, urgent),
        assemblies=[_assembly(endpoint, fields, text) for _ in range(fields.n or 1)],
        head=Head(endpoint.id_prefix + exchange.id, exchange.created, fields.model, fingerprint, urgent.service_tier),
        stream=bool(fields.stream),
        include_usage=fields.include_usage,
        asked=fields.output_limit,
    )


def _request(
    exchange: Exchange,
    fields: GenerationFields,
    prompt: Sequence[int],
    max_tokens: int,
    tenant: Tenant,
    urgent: Urgency,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=exchange.id,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=fields.sampling(),
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
        cache_salt=tenant.cache_salt(fields.cache_salt),
        tenant=tenant.name,
        weight=tenant.config.weight,
        tier=urgent.tier,
        priority=urgent.priority,
        timeout=urgent.remaining(monotonic() - exchange.started),
        n=fields.n or 1,
        deterministic=bool(fields.deterministic),
    )


def _assembly(endpoint: Endpoint[Any], fields: GenerationFields, text: ModelText) -> TextAssembly:
    detokenizer = Detokenizer(text.tokenizer.pieces, continues=endpoint.continues_prompt)
    return TextAssembly(detokenizer, fields.stop, fields.min_tokens or 0)


def _refuse_many_answers(n: int, most: int) -> None:
    if n > most:
        raise InvalidRequest(
            f"n: at most {most} answers to one request are given here (gateway.max_n), not {n}",
            param="n",
            code="invalid_value",
        )


def _refuse_indeterminate(fields: GenerationFields, info: ModelInfo) -> None:
    if fields.deterministic and not info.deterministic:
        raise InvalidRequest(
            f"deterministic: the back end {info.attention_backend} cannot promise it; leave it out, or serve the model "
            "with the back end cpu (engine.attention_backend)",
            param="deterministic",
            code="unsupported_parameter",
        )


def _writer(request: web.Request, endpoint: Endpoint[Any], job: _Job) -> Whole | Streamed:
    if job.stream:
        return Streamed(request, endpoint, job.head, include_usage=job.include_usage)
    return Whole(request[EXCHANGE], endpoint, job.head, job.request.n)


def _fit(
    prompt_tokens: int, fields: GenerationFields, endpoint: Endpoint[Any], text: ModelText, gateway: Gateway
) -> int:
    reject = gateway.config.gateway.backpressure.reject_on_oom
    try:
        limit = output_tokens(prompt_tokens, fields.output_limit, text.info, reject_on_oom=reject)
    except ContextLengthExceeded as error:
        error.param = endpoint.prompt_field
        raise
    batching = gateway.config.batching
    if batching.kind != "continuous":
        refuse_beyond_batch(prompt_tokens, batching.max_tokens_in_batch, endpoint.prompt_field, "the prompt")
    if (fields.min_tokens or 0) > limit:
        raise ContextLengthExceeded(
            f"min_tokens asks for {fields.min_tokens} tokens, but a prompt of {prompt_tokens} leaves room for {limit}",
            param="min_tokens",
        )
    return limit
