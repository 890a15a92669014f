"""One generating request from head to last byte. Used by `app` for chat and completions.

The order is by cost: refuse whom nobody knows; refuse while draining, not ready or overloaded; read the body; check its
fields and the model's name; tokenise; check lengths; only then the engine. Everything that can be known up front is
answered before a stream's head goes out, so that a streamed and a whole answer fail alike; the head goes out with the
first token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import Any

from aiohttp import web

from paceline_server.engine.interface import FinishReason, GenerationRequest, Task
from paceline_server.errors import ContextLengthExceeded
from paceline_server.gateway.answers import Endpoint, Head, Json, usage
from paceline_server.gateway.assembly import Delta, TextAssembly
from paceline_server.gateway.context import output_tokens, refuse_limit_beyond_context
from paceline_server.gateway.detokenizer import Detokenizer
from paceline_server.gateway.exchange import EXCHANGE, Exchange
from paceline_server.gateway.generation import Meter, generate
from paceline_server.gateway.mistakes import validate
from paceline_server.gateway.model_text import ModelText
from paceline_server.gateway.requests import GenerationFields
from paceline_server.gateway.state import GATEWAY, Gateway, identify
from paceline_server.gateway.stream import EventStream
from paceline_server.gateway.strict_json import parse_object
from paceline_server.gateway.tenants import Tenant
from paceline_server.gateway.urgency import TIMEOUT_HEADER, urgency

_PARSE_IN_WORKER_BYTES = 64 * 1024  # smaller bodies are parsed faster than a thread is woken


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that was found in order. It keeps token ids and no text: thousands may wait."""

    request: GenerationRequest
    assembly: TextAssembly
    head: Head
    stream: bool
    include_usage: bool
    asked: int | None  # output tokens by the client's own limit


async def answer(request: web.Request, endpoint: Endpoint[Any]) -> web.StreamResponse:
    """Serve one request of a generating endpoint.

    Raises:
        RequestError: it is refused, or fails; the middleware answers, also in the middle of a stream.
    """
    gateway, exchange = request.app[GATEWAY], request[EXCHANGE]
    exchange.generates = True
    tenant = identify(request)
    account = gateway.accounts.of(tenant)
    async with gateway.drain.work():
        text = gateway.require_text(Task.GENERATE)
        account.count_request(exchange)
        with gateway.backpressure.enter() as ticket:
            job = await _prepare(request, endpoint, text, tenant)
            with account.charge(exchange, job.asked, job.request.max_tokens):
                gateway.backpressure.submit(ticket, exchange.prompt_tokens)
                meter = Meter(exchange, gateway.metrics, on_start=lambda: gateway.backpressure.started(ticket))
                writer = _Streamed(request, endpoint, job) if job.stream else _Whole(exchange, endpoint, job)
                await generate(gateway.engine, job.request, job.assembly, meter, writer.take)
                return await writer.finish()


async def _prepare(request: web.Request, endpoint: Endpoint[Any], text: ModelText, tenant: Tenant) -> _Job:
    gateway, exchange = request.app[GATEWAY], request[EXCHANGE]
    async with gateway.bodies.body(request) as body:
        fields = await _read(body, endpoint, gateway)
        gateway.require_model(fields.model)
        refuse_limit_beyond_context(fields.output_limit, fields.output_limit_field, text.info)
        text.refuse_unknown(fields.stop_token_ids, "stop_token_ids")
        urgent = urgency(fields, request.headers.get(TIMEOUT_HEADER), gateway.config.scheduling, tenant.config)
        prompt = await endpoint.encode(fields, text)
    exchange.prompt_tokens = len(prompt)
    fingerprint = gateway.fingerprint(text.info)
    head = Head(endpoint.id_prefix + exchange.id, exchange.created, fields.model, fingerprint, urgent.service_tier)
    detokenizer = Detokenizer(text.tokenizer.pieces, continues=endpoint.continues_prompt)
    return _Job(
        request=GenerationRequest(
            request_id=exchange.id,
            prompt_token_ids=prompt,
            max_tokens=_fit(len(prompt), fields, endpoint, text, gateway),
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
        ),
        assembly=TextAssembly(detokenizer, fields.stop, fields.min_tokens or 0),
        head=head,
        stream=bool(fields.stream),
        include_usage=fields.include_usage,
        asked=fields.output_limit,
    )


async def _read(body: bytes, endpoint: Endpoint[Any], gateway: Gateway) -> GenerationFields:
    def parse() -> GenerationFields:
        fields: GenerationFields = validate(endpoint.fields, parse_object(body))
        return fields

    if len(body) < _PARSE_IN_WORKER_BYTES:
        return parse()
    return await asyncio.get_running_loop().run_in_executor(gateway.workers, parse)


def _fit(
    prompt_tokens: int, fields: GenerationFields, endpoint: Endpoint[Any], text: ModelText, gateway: Gateway
) -> int:
    reject = gateway.config.gateway.backpressure.reject_on_oom
    try:
        limit = output_tokens(prompt_tokens, fields.output_limit, text.info, reject_on_oom=reject)
    except ContextLengthExceeded as error:
        error.param = endpoint.prompt_field
        raise
    if (fields.min_tokens or 0) > limit:
        raise ContextLengthExceeded(
            f"min_tokens asks for {fields.min_tokens} tokens, but a prompt of {prompt_tokens} leaves room for {limit}",
            param="min_tokens",
        )
    return limit


class _Whole:
    """Collects an answer and gives it out in one piece."""

    def __init__(self, exchange: Exchange, endpoint: Endpoint[Any], job: _Job) -> None:
        self._exchange = exchange
        self._endpoint = endpoint
        self._job = job
        self._parts: list[str] = []

    async def take(self, delta: Delta) -> None:
        self._parts.append(delta.text)

    async def finish(self) -> web.StreamResponse:
        choice = self._endpoint.whole("".join(self._parts), _reason(self._exchange))
        body = {**self._job.head.json(self._endpoint.kind), "choices": [choice], "usage": usage(self._exchange)}
        return web.json_response(body)


class _Streamed:
    """Gives out an answer as it comes."""

    def __init__(self, request: web.Request, endpoint: Endpoint[Any], job: _Job) -> None:
        self._exchange = request[EXCHANGE]
        self._endpoint = endpoint
        self._job = job
        self._stream = EventStream(request, self._exchange.headers)
        self._opened = False

    async def take(self, delta: Delta) -> None:
        choices = [] if self._opened else self._endpoint.opening()
        if delta.text:
            choices.append(self._endpoint.piece(delta.text))
        if choices:
            self._opened = True
            self._exchange.stream = self._stream
            await self._stream.send(*(self._chunk([choice]) for choice in choices))

    async def finish(self) -> web.StreamResponse:
        self._exchange.stream = self._stream
        await self._stream.send(self._chunk([self._endpoint.closing(_reason(self._exchange))]))
        if self._job.include_usage:
            await self._stream.send({**self._chunk([]), "usage": usage(self._exchange)})
        await self._stream.finish()
        return self._stream.response

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._job.head.json(self._endpoint.chunk_kind), "choices": choices}
        return {**chunk, "usage": None} if self._job.include_usage else chunk


def _reason(exchange: Exchange) -> FinishReason:
    assert exchange.finish is not None, "generate() returns after the last delta"
    return exchange.finish
