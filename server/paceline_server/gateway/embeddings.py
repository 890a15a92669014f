"""POST /v1/embeddings: texts in, one vector each. Used by `app`. Nothing is streamed; an answer is all or nothing."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import byteorder
from time import monotonic

from aiohttp import web

from paceline_server.engine.interface import EmbeddingOutput, EmbeddingRequest, Task
from paceline_server.errors import ContextLengthExceeded, InvalidRequest
from paceline_server.gateway.answers import priced
from paceline_server.gateway.context import refuse_beyond_batch
from paceline_server.gateway.embedding_request import EmbeddingFields
from paceline_server.gateway.exchange import EXCHANGE, Exchange
from paceline_server.gateway.metrics import GatewayMetrics
from paceline_server.gateway.model_text import ModelText
from paceline_server.gateway.reception import NO_OUTPUTS, Outputs, by_size, fields_of, receive
from paceline_server.gateway.state import GATEWAY, Gateway
from paceline_server.gateway.tenants import Tenant
from paceline_server.gateway.urgency import TIMEOUT_HEADER, patience

MAX_TOKENS = 300_000  # of a request, all texts together, as in the OpenAI reference


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that was found in order."""

    request: EmbeddingRequest
    model: str
    as_base64: bool

    @property
    def outputs(self) -> Outputs:
        """It generates nothing."""
        return NO_OUTPUTS


async def create_embeddings(request: web.Request) -> web.Response:
    """Serve one request.

    Raises:
        RequestError: it is refused, or fails; the middleware answers.
    """
    gateway, exchange = request.app[GATEWAY], request[EXCHANGE]

    async def prepare(body: bytes, text: ModelText, tenant: Tenant) -> _Job:
        return await _prepare(request, await fields_of(gateway, body, EmbeddingFields), text, tenant)

    async def compute(job: _Job, on_start: Callable[[], None]) -> web.Response:
        output = await gateway.engine.embed(job.request)
        on_start()
        _measure(exchange, gateway.metrics, output)
        return await _answer(gateway, job, output, exchange)

    return await receive(request, Task.EMBED, prepare, compute)


async def _prepare(request: web.Request, fields: EmbeddingFields, text: ModelText, tenant: Tenant) -> _Job:
    gateway, exchange = request.app[GATEWAY], request[EXCHANGE]
    urgent = patience(fields.timeout, request.headers.get(TIMEOUT_HEADER), gateway.config.scheduling, tenant.config)
    _require_dimensions(fields.dimensions, text.info.dimensions)
    inputs = await _encode(fields.input, text, gateway.config.batching.max_tokens_in_batch)
    exchange.prompt_tokens = sum(map(len, inputs))
    _require_sum(exchange.prompt_tokens)
    return _Job(
        request=EmbeddingRequest(
            exchange.id,
            inputs,
            timeout=urgent.remaining(monotonic() - exchange.started),
            tenant=tenant.name,
            weight=tenant.config.weight,
        ),
        model=fields.model,
        as_base64=fields.encoding_format == "base64",
    )


async def _encode(given: Sequence[str] | Sequence[Sequence[int]], text: ModelText, budget: int) -> list[Sequence[int]]:
    """Token ids of each input, within the model's length and the tokens that a batch holds."""
    texts = [one for one in given if isinstance(one, str)]
    inputs: list[Sequence[int]] = [*await text.encode_texts(texts, "input")] if texts else []
    for ids in (one for one in given if not isinstance(one, str)):
        text.refuse_unknown(ids, "input")
        inputs.append(ids)
    limit = text.info.max_model_len
    for index, ids in enumerate(inputs):
        if len(ids) > limit:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {limit} tokens. However, input {index} has {len(ids)}. "
                "Shorten it, or embed it in parts.",
                param="input",
            )
        refuse_beyond_batch(len(ids), budget, "input", f"input {index}")
    return inputs


def _require_sum(tokens: int) -> None:
    if tokens > MAX_TOKENS:
        raise InvalidRequest(
            f"input: at most {MAX_TOKENS} tokens in one request, in all its texts, not {tokens}; "
            "send the texts in several requests",
            param="input",
            code="invalid_value",
        )


def _require_dimensions(asked: int | None, dimensions: int | None) -> None:
    if asked not in (None, dimensions):
        raise InvalidRequest(
            f"dimensions: this model's embeddings have {dimensions}, and shorter ones are not supported; leave it out",
            param="dimensions",
            code="unsupported_parameter",
        )


def _measure(exchange: Exchange, metrics: GatewayMetrics, output: EmbeddingOutput) -> None:
    """An answer comes in one piece: its first token, for objectives, is the whole of it."""
    exchange.first_token = monotonic()
    elapsed = exchange.first_token - exchange.started
    metrics.ttft.observe(elapsed)
    metrics.e2e.observe(elapsed)
    metrics.queue_time.observe(output.queue_seconds)
    metrics.prompt_tokens.inc(exchange.prompt_tokens)


async def _answer(gateway: Gateway, job: _Job, output: EmbeddingOutput, exchange: Exchange) -> web.Response:
    vectors = output.vectors
    assert vectors is not None, "embed() raises where the timeout was over"

    def build() -> web.Response:
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, as_base64=job.as_base64)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": exchange.prompt_tokens, "total_tokens": exchange.prompt_tokens}
        body = {"object": "list", "data": data, "model": job.model, "usage": priced(usage, exchange)}
        return web.json_response(body)

    return await by_size(gateway, sum(map(len, vectors)), build)


def _written(vector: bytes, *, as_base64: bool) -> str | list[float]:
    if as_base64:
        return base64.b64encode(vector).decode("ascii")
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
