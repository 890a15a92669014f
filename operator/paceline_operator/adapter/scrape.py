"""Reads a pod's /metrics into the few numbers that scaling needs.

Called by the adapter's collector, by the operator for its printer columns and by local mode for its status table. A
scrape that fails raises ScrapeError, or is that error in the answer of `scrape_all`: the numbers are then missing, and
nobody may take them for zero.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as ExpositionSample

from paceline_operator.adapter.errors import ScrapeError
from paceline_operator.adapter.histogram import Histogram

WAITING = "paceline_requests_waiting"
RUNNING = "paceline_requests_running"
TTFT_BUCKET = "paceline_ttft_seconds_bucket"
SCRAPE_SECONDS = 2.0
"""A pod that cannot answer in this time is as good as missing: the HPA asks every 15 s and wants all pods."""
AT_ONCE = 100
"""Pods that are scraped together. The pool of a session, aiohttp's default, has as many connections."""
MAX_EXPOSITION_BYTES = 4 * 1024 * 1024
"""Far above what a server exposes (some 30 kB); bounds the memory that a broken pod can cost."""

_WANTED = (WAITING, RUNNING, TTFT_BUCKET)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one pod reported at one moment. `at` is in seconds of the caller's monotonic clock."""

    at: float
    waiting: float
    running: float
    ttft: Histogram

    @property
    def depth(self) -> float:
        """Requests in the pod: waiting and running."""
        return self.waiting + self.running


def parse_sample(exposition: str, at: float) -> Sample:
    """Read the text format. Values of several label sets (one per served model) are added up.

    Raises:
        ScrapeError: when a metric is absent, or the text is not what Prometheus' format says.
    """
    # Only our lines go to the parser: it takes milliseconds for a whole page, and a page is read every few seconds.
    ours = "".join(line + "\n" for line in exposition.splitlines() if line.startswith(_WANTED))
    try:
        families = list(text_string_to_metric_families(ours))
        samples = [sample for family in families for sample in family.samples]
        return Sample(at, _gauge(samples, WAITING), _gauge(samples, RUNNING), _histogram(samples))
    except (ValueError, KeyError) as error:
        raise ScrapeError(f"not a Paceline exposition: {error}") from error


def _gauge(samples: Iterable[ExpositionSample], name: str) -> float:
    values = [sample.value for sample in samples if sample.name == name]
    if not values:
        raise ValueError(f"{name} is absent")
    total = sum(values)
    if not 0 <= total < math.inf:  # also refuses NaN
        raise ValueError(f"{name} is {total}, a number of requests is expected")
    return total


def _histogram(samples: Iterable[ExpositionSample]) -> Histogram:
    buckets: dict[float, float] = {}
    for sample in samples:
        if sample.name == TTFT_BUCKET:
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return Histogram.from_cumulative(buckets)


async def fetch_sample(
    session: aiohttp.ClientSession,
    url: str,
    timeout_seconds: float = SCRAPE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Sample:
    """Fetch one pod's metrics from `url` (http://IP:PORT/metrics).

    Raises:
        ScrapeError: on a network error, a timeout, a status other than 200, or a page that cannot be read.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    try:
        async with session.get(url, timeout=timeout, allow_redirects=False) as response:
            if response.status != 200:
                raise ScrapeError(f"{url} answered {response.status}")
            body = await _read_bounded(response, url)
        return parse_sample(body.decode(), clock())
    except TimeoutError as error:
        raise ScrapeError(f"{url} did not answer within {timeout_seconds:g} s") from error
    except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
        raise ScrapeError(f"{url} cannot be read: {error}") from error


async def _read_bounded(response: aiohttp.ClientResponse, url: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_EXPOSITION_BYTES:
            raise ScrapeError(f"{url} sent more than {MAX_EXPOSITION_BYTES} bytes")
    return bytes(body)


async def scrape_all(
    session: aiohttp.ClientSession,
    urls: Mapping[str, str],
    timeout_seconds: float = SCRAPE_SECONDS,
    at_once: int = AT_ONCE,
) -> dict[str, Sample | ScrapeError]:
    """Fetch many pods (key → URL). Every key is in the answer, with its sample or the reason why not.

    A pod's time begins with its turn: where many are slow, those behind them do not look dead.
    """
    turns = asyncio.Semaphore(at_once)

    async def one(url: str) -> Sample | ScrapeError:
        async with turns:
            try:
                return await fetch_sample(session, url, timeout_seconds)
            except ScrapeError as error:
                return error

    results = await asyncio.gather(*(one(url) for url in urls.values()))
    return dict(zip(urls, results, strict=True))
