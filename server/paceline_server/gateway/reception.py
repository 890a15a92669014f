"""What every request for the engine passes, in one order, whatever its endpoint. Used by `service` and `embeddings`.

The order is by cost: refuse whom nobody knows; refuse while draining, not ready or overloaded; read the body; take a
place in the queue; check fields and the model's name; tokenise; check lengths; charge its tenant; only then others may
lose their places to it, and it goes to the engine.
An endpoint brings the parts that are its own: `prepare` makes a job of a request, `compute` has it done and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from aiohttp import web

from paceline_server.engine.interface import Task
from paceline_server.gateway.backpressure import Backpressure
from paceline_server.gateway.exchange import EXCHANGE
from paceline_server.gateway.fields import RequestFields
from paceline_server.gateway.mistakes import validate
from paceline_server.gateway.model_text import ModelText
from paceline_server.gateway.shares import Ticket
from paceline_server.gateway.state import GATEWAY, Gateway, dress, identify
from paceline_server.gateway.strict_json import parse_object
from paceline_server.gateway.tenants import Tenant

_IN_WORKER_BYTES = 64 * 1024  # smaller bodies and answers are coded faster than a thread is woken


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a request may generate, in tokens.

    Attributes:
        asked: that the client lets an answer have, or None.
        room: that an answer may have in any case.
        answers: how many the client wants.
    """

    asked: int | None
    room: int
    answers: int = 1


NO_OUTPUTS = Outputs(0, 0)


class Job(Protocol):
    """A request that was found in order; its exchange knows the tokens of its prompt."""

    @property
    def outputs(self) -> Outputs:
        """What it may generate."""
        ...


Prepared = TypeVar("Prepared", bound=Job)
Answer = TypeVar("Answer", bound=web.StreamResponse)
Fields = TypeVar("Fields", bound=RequestFields)
Result = TypeVar("Result")


async def receive(
    request: web.Request,
    task: Task,
    prepare: Callable[[bytes, ModelText, Tenant], Awaitable[Prepared]],
    compute: Callable[[Prepared, Callable[[], None]], Awaitable[Answer]],
) -> Answer:
    """Serve one request.

    Args:
        task: what the model must be for.
        prepare: reads the request's body, for a tenant.
        compute: has it done by the engine, and calls what it is given when the engine has begun to answer.

    Raises:
        RequestError: it is refused, or fails; the middleware answers, also in the middle of a stream.
    """
    gateway, exchange = request.app[GATEWAY], request[EXCHANGE]
    exchange.generates = True
    tenant = identify(request)
    account = gateway.accounts.of(tenant)
    async with gateway.drain.work():
        text = gateway.require_text(task)
        account.count_request(exchange)
        gateway.backpressure.require_room(tenant.config)
        with ExitStack() as bill:  # settled last: a request that loses its place was refused, not abandoned
            async with AsyncExitStack() as place:
                ticket, job = await _take_in(request, place, tenant, lambda body: prepare(body, text, tenant))
                outputs = job.outputs
                bill.enter_context(account.charge(exchange, outputs.asked, outputs.room, outputs.answers))
                gateway.backpressure.submit(ticket, exchange.prompt_tokens)
                answer = await compute(job, lambda: gateway.backpressure.started(ticket))
        await write_out(request, answer)
        return answer


async def write_out(request: web.Request, answer: web.StreamResponse) -> None:
    """Hand an answer to the socket, all of it, while a drain still waits for it; a stream is there already.

    Raises:
        ConnectionError: the client is gone.
    """
    if answer.prepared:
        return
    dress(request, answer)
    try:
        await answer.prepare(request)
        await answer.write_eof()
    except asyncio.CancelledError:
        if request.transport is not None:
            request.transport.abort()  # no error can follow half an answer
        raise


async def fields_of(gateway: Gateway, body: bytes, kind: type[Fields]) -> Fields:
    """The body's fields, checked, and the model's name in them as well.

    Raises:
        RequestError: the body is not in order, or asks for another model.
    """
    fields = await by_size(gateway, len(body), lambda: validate(kind, parse_object(body)))
    gateway.require_model(fields.model)
    return fields


async def _take_in(
    request: web.Request, place: AsyncExitStack, tenant: Tenant, prepare: Callable[[bytes], Awaitable[Prepared]]
) -> tuple[Ticket, Prepared]:
    """Make a job of a request. It has a place in the queue from when its body is there, and keeps that in `place`."""
    gateway = request.app[GATEWAY]
    async with gateway.bodies.body(request) as body:
        ticket = await place.enter_async_context(_queued(gateway.backpressure, tenant))
        return ticket, await prepare(body)


@asynccontextmanager
async def _queued(queue: Backpressure, tenant: Tenant) -> AsyncIterator[Ticket]:
    """A place in the queue.

    Raises:
        Overloaded: there is none, or it went to another tenant's request before this one started.
    """
    scope = asyncio.timeout(None)
    try:
        async with scope:
            with queue.enter(tenant.config, lose=lambda: scope.reschedule(0.0)) as ticket:
                yield ticket
    except TimeoutError:
        if not scope.expired():
            raise
        raise queue.lost() from None


async def by_size(gateway: Gateway, size: int, work: Callable[[], Result]) -> Result:
    """Do a piece of coding here, or in a worker where it would hold up everybody else.

    Args:
        size: bytes to read or write.
    """
    if size < _IN_WORKER_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(gateway.workers, work)
