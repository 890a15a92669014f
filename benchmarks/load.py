"""The load generator: clients that stream completions and note when each piece arrives.

Closed loop: each client sends its next request when the last one has ended. Open loop: requests come at their own
times. The clients run in this one process, outside the server's; how much processor time they take is in the result.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import aiohttp

from benchmarks.workloads import Request


@dataclass(slots=True)
class Record:
    """One request as its client saw it; times are seconds on one clock."""

    sent: float
    output_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)  # of the pieces that carried text
    ended: float = 0.0
    error: str | None = None
    prompt_tokens: int = 0  # as the server counts them


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run came to. Times in seconds.

    Attributes:
        clients: of a closed loop; None for an open one.
        rate: requests per second of an open loop; None for a closed one.
    """

    clients: int | None
    rate: float | None
    requests: int
    errors: int
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


async def closed_loop(
    url: str, requests: Sequence[Request], clients: int, body: dict[str, Any], *, keep_alive: bool = True
) -> list[Record]:
    """Send all requests with `clients` clients at `url` (…/v1/completions).

    Args:
        body: fields added to every request: the model's name, how this server ignores the end of sequence.
        keep_alive: use a connection again.
    """
    line = iter(requests)
    records: list[Record] = []

    async def client(session: aiohttp.ClientSession) -> None:
        for request in line:  # shared by all clients: each takes the next one
            await _ask(session, url, request, body, records)

    async with _session(keep_alive) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return records


async def open_loop(
    url: str, requests: Sequence[Request], arrivals: Sequence[float], body: dict[str, Any], *, keep_alive: bool = True
) -> list[Record]:
    """Send each request at its own time, whatever has become of the others.

    Args:
        arrivals: seconds from the begin, one a request.
    """
    records: list[Record] = []
    begin = perf_counter()

    async def send(session: aiohttp.ClientSession, request: Request, arrival: float) -> None:
        await asyncio.sleep(max(0.0, begin + arrival - perf_counter()))
        await _ask(session, url, request, body, records)

    async with _session(keep_alive) as session:
        await asyncio.gather(*(send(session, *one) for one in zip(requests, arrivals, strict=True)))
    return records


def poisson(rate: float, count: int, *, seed: int = 0) -> list[float]:
    """`count` arrival times in seconds of a Poisson process with `rate` arrivals a second."""
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def _session(keep_alive: bool) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=not keep_alive)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=600), connector=connector)


async def _ask(
    session: aiohttp.ClientSession, url: str, request: Request, body: dict[str, Any], records: list[Record]
) -> None:
    record = Record(sent=perf_counter())
    records.append(record)
    payload = {"prompt": request.prompt, "max_tokens": request.max_tokens, "stream": True, **body}
    try:
        await _stream(session, url, payload, record)
    except (aiohttp.ClientError, ValueError, TimeoutError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.ended = perf_counter()
    record.error = record.error or mismatch(record, request)


def mismatch(record: Record, request: Request) -> str | None:
    """In what an answer is not to the request: of other lengths, its times compare with nobody's."""
    if record.prompt_tokens != request.prompt_tokens:
        return f"a prompt of {record.prompt_tokens} tokens instead of {request.prompt_tokens}"
    if record.output_tokens != request.max_tokens:
        return f"{record.output_tokens} tokens instead of {request.max_tokens}"
    return None


async def _stream(session: aiohttp.ClientSession, url: str, payload: dict[str, Any], record: Record) -> None:
    async with session.post(url, json=payload) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ValueError(f"error in the stream: {chunk['error']}")
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                record.arrivals.append(perf_counter())
            if usage := chunk.get("usage"):
                record.output_tokens, record.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


def summarise(records: Sequence[Record], *, clients: int | None = None, rate: float | None = None) -> Figures:
    """Figures of a run; requests that failed count as errors and in nothing else."""
    good = [record for record in records if record.error is None]
    ttft = [record.arrivals[0] - record.sent for record in good if record.arrivals]
    gaps = [b - a for record in good for a, b in zip(record.arrivals, record.arrivals[1:], strict=False)]
    tokens = sum(record.output_tokens for record in good)
    seconds = max(record.ended for record in records) - min(record.sent for record in records)
    return Figures(
        clients=clients,
        rate=rate,
        requests=len(records),
        errors=len(records) - len(good),
        seconds=seconds,
        output_tokens=tokens,
        output_tokens_per_second=tokens / seconds,
        ttft_p50=median(ttft) if ttft else 0.0,
        ttft_p99=percentile(ttft, 0.99),
        itl_p50=median(gaps) if gaps else 0.0,
        itl_p99=percentile(gaps, 0.99),
    )


def spans(records: Sequence[Record]) -> tuple[tuple[float, float, float], ...]:
    """When each request that succeeded was sent, had its first token and ended, in seconds from the first one sent."""
    begin = min(record.sent for record in records)
    good = (record for record in records if record.error is None and record.arrivals)
    moments = ((record.sent, record.arrivals[0], record.ended) for record in good)
    return tuple((round(a - begin, 3), round(b - begin, 3), round(c - begin, 3)) for a, b, c in moments)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; 0 of no values."""
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
