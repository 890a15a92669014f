"""The load generator: clients that stream completions and note when each piece arrives.

Closed loop: each client sends its next request when the last one has ended. The clients run in this one process,
outside the server's; the caller pins the two apart where cores allow it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run came to. Times in seconds."""

    clients: int
    requests: int
    errors: int
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


async def closed_loop(url: str, requests: Sequence[Request], clients: int, body: dict[str, Any]) -> Figures:
    """Send all requests with `clients` clients at `url` (…/v1/completions).

    Args:
        body: fields added to every request: the model's name, how this server ignores the end of sequence.
    """
    line = iter(requests)
    records: list[Record] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        begin = perf_counter()
        await asyncio.gather(*(_client(session, url, line, body, records) for _ in range(clients)))
        seconds = perf_counter() - begin
    return summarise(records, clients, seconds)


async def _client(
    session: aiohttp.ClientSession, url: str, line: Iterator[Request], body: dict[str, Any], records: list[Record]
) -> None:
    for request in line:  # shared by all clients: each takes the next one
        record = Record(sent=perf_counter())
        records.append(record)
        payload = {"prompt": request.prompt, "max_tokens": request.max_tokens, "stream": True, **body}
        try:
            await _stream(session, url, payload, record)
        except (aiohttp.ClientError, ValueError, TimeoutError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.ended = perf_counter()
        if record.error is None and record.output_tokens != request.max_tokens:
            record.error = f"{record.output_tokens} tokens instead of {request.max_tokens}"


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
                record.output_tokens = usage["completion_tokens"]


def summarise(records: Sequence[Record], clients: int, seconds: float) -> Figures:
    """Figures of a run; requests that failed count as errors and in nothing else."""
    good = [record for record in records if record.error is None]
    ttft = [record.arrivals[0] - record.sent for record in good if record.arrivals]
    gaps = [b - a for record in good for a, b in zip(record.arrivals, record.arrivals[1:], strict=False)]
    tokens = sum(record.output_tokens for record in good)
    return Figures(
        clients=clients,
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


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; 0 of no values."""
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
