"""Embedding requests/s at 16 clients: ours against sentence-transformers' own `encode` behind HTTP.

    python -m benchmarks.embeddings [--quick]

Same weights (all-MiniLM-L6-v2, float32), same texts of 4 to 200 words, same HTTP library, base64 answers; the servers
in turns, three rounds. Writes benchmarks/results/embeddings.json:

- `over_sentence_transformers`: requests/s of 16 clients that send one text each, ours over theirs.
- `lists_over_sentence_transformers`: texts/s where each of 4 clients sends 32 texts a request. Here `encode` makes
  batches itself, sorted by length and padded, so what remains is packing, and the overlap of HTTP with the model.

The run fails where our vector of a text and theirs have a cosine below 0.9999.

Needs `scripts/embedding_model.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import aiohttp
import yaml

from benchmarks.environments import CACHE, PEERS, interruptible
from benchmarks.load import percentile
from benchmarks.machine import OthersMeter, cores, rss_bytes, tree
from benchmarks.peers.sentences import sentence_transformers
from benchmarks.results import NOISY_CORES, write_rows
from benchmarks.servers import Server, paceline, running
from benchmarks.workloads import WORDS

STORE = Path(os.environ.get("PACELINE_MODEL_STORE", CACHE / "models"))
MODEL = STORE / "sentence-transformers" / "all-MiniLM-L6-v2"
CLIENTS = 16
LIST_CLIENTS, LIST_LENGTH = 4, 32
SAME = 0.9999  # cosine from which two vectors are the same


@dataclass(frozen=True, slots=True)
class EmbeddingRun:
    """One run of one server. Times in seconds."""

    server: str
    version: str
    round: int
    texts_per_request: int
    clients: int
    requests_per_second: float
    texts_per_second: float
    latency_p50: float
    latency_p99: float
    start_seconds: float
    rss_mib: float
    others_cores: float
    noisy: bool


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 4 to 200 words, log-normal, half of them below 25: queries, and passages to be found."""
    random = Random(seed)
    lengths = (max(4, min(200, round(25 * random.lognormvariate(0.0, 0.8)))) for _ in range(count))
    return [" ".join(random.choices(WORDS, k=length)) for length in lengths]


async def closed_loop(
    server: Server, requests: Sequence[Sequence[str]], clients: int
) -> tuple[float, list[float], list[array[float]]]:
    """Send all requests; returns the seconds in all, each request's, and the vectors in the order of the texts."""
    latencies: list[float] = []
    vectors: dict[int, list[array[float]]] = {}
    line = enumerate(requests)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begin = perf_counter()
        await asyncio.gather(*(_client(session, server, line, latencies, vectors) for _ in range(clients)))
        seconds = perf_counter() - begin
    return seconds, latencies, [vector for number in sorted(vectors) for vector in vectors[number]]


async def _client(
    session: aiohttp.ClientSession,
    server: Server,
    line: Iterator[tuple[int, Sequence[str]]],
    latencies: list[float],
    vectors: dict[int, list[array[float]]],
) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/embeddings"
    for number, given in line:  # shared by all clients: each takes the next one
        begin = perf_counter()
        body = {"model": "m", "encoding_format": "base64", "input": list(given) if len(given) > 1 else given[0]}
        async with session.post(url, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        latencies.append(perf_counter() - begin)
        vectors[number] = [array("f", base64.b64decode(item["embedding"])) for item in answer["data"]]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Of two vectors."""
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def our_server(folder: Path, threads: int) -> Server:
    """Ours on the embedding model; waits up to 2 ms for company when arrivals say that it pays."""
    server = paceline(MODEL, folder, port=18021, dtype="float32", threads=threads)
    path = Path(server.command[-1])
    config = yaml.safe_load(path.read_text())
    config["batching"] = {"max_batch_size": 32, "max_tokens_in_batch": 2048, "max_queue_delay_us": 2000}
    path.write_text(yaml.safe_dump(config))
    return server


def measure(server: Server, number: int, given: Sequence[str], lists: int) -> tuple[list[EmbeddingRun], list[Any]]:
    """One round of one server: single texts, then lists; and its vectors."""
    runs: list[EmbeddingRun] = []
    with running(server, PEERS / f"{server.name.replace(' ', '-')}-embeddings.log") as up:
        asyncio.run(closed_loop(server, [[text] for text in given[:CLIENTS]], CLIENTS))  # warm-up, not counted
        single = [[text] for text in given]
        listed = [given[at : at + LIST_LENGTH] for at in range(0, lists * LIST_LENGTH, LIST_LENGTH)]
        vectors: list[Any] = []
        for requests, clients in ((single, CLIENTS), (listed, LIST_CLIENTS)):
            others = OthersMeter([os.getpid()])
            seconds, latencies, found = asyncio.run(closed_loop(server, requests, clients))
            vectors = vectors or found
            by_others = others.read()
            runs.append(
                EmbeddingRun(
                    server=server.name,
                    version=server.version,
                    round=number,
                    texts_per_request=len(requests[0]),
                    clients=clients,
                    requests_per_second=len(requests) / seconds,
                    texts_per_second=len(found) / seconds,
                    latency_p50=percentile(latencies, 0.5),
                    latency_p99=percentile(latencies, 0.99),
                    start_seconds=up.start_seconds,
                    rss_mib=rss_bytes(tree(up.pid)) / 2**20,
                    others_cores=by_others,
                    noisy=by_others > NOISY_CORES,
                )
            )
            print(f"round {number} {server.name}: {runs[-1].texts_per_second:.0f} texts/s", flush=True)
    return runs, vectors


def main() -> None:
    """Measure in turns, write the result file, print the table."""
    parser = argparse.ArgumentParser(description="Embeddings beside sentence-transformers")
    parser.add_argument("--quick", action="store_true", help="one round of few texts; writes nothing")
    quick = parser.parse_args().quick
    given, rounds = texts(96 if quick else 768), 1 if quick else 3
    lists = len(given) // LIST_LENGTH
    threads = len(cores())
    runs: list[EmbeddingRun] = []
    vectors: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        servers = [our_server(Path(scratch), threads), sentence_transformers(MODEL, port=18022, threads=threads)]
        for number in range(rounds):
            for server in servers:
                found, vectors[server.name] = measure(server, number, given, lists)
                runs += found
    ours, theirs = (server.name for server in servers)
    ratios = {
        "over_sentence_transformers": _rate(runs, ours, 1) / _rate(runs, theirs, 1),
        "lists_over_sentence_transformers": _rate(runs, ours, LIST_LENGTH) / _rate(runs, theirs, LIST_LENGTH),
    }
    closest = min(cosine(a, b) for a, b in zip(vectors[ours], vectors[theirs], strict=True))
    print(table(runs), ratios, f"smallest cosine {closest:.6f}", sep="\n")
    if closest < SAME:
        raise SystemExit(f"the vectors are not the same: cosine {closest}")
    if not quick:
        workload = {
            "model": MODEL.name,
            "dtype": "float32",
            "texts": len(given),
            "words": "4..200",
            "cosine_min": closest,
        }
        print(write_rows("embeddings", workload, [asdict(run) for run in runs], ratios))


def _counted(runs: Sequence[EmbeddingRun], server: str, size: int) -> list[EmbeddingRun]:
    own = [run for run in runs if run.server == server and run.texts_per_request == size]
    return [run for run in own if not run.noisy] or own


def _rate(runs: Sequence[EmbeddingRun], server: str, size: int) -> float:
    return median(run.texts_per_second for run in _counted(runs, server, size))


def table(runs: Sequence[EmbeddingRun]) -> str:
    """Markdown: medians of the runs that count."""
    lines = ["| server | texts a request | clients | texts/s | latency p50 / p99 ms | RSS MiB |", "|---" * 6 + "|"]
    for server, size in dict.fromkeys((run.server, run.texts_per_request) for run in runs):
        own = _counted(runs, server, size)
        p50, p99 = (1e3 * median(getattr(run, key) for run in own) for key in ("latency_p50", "latency_p99"))
        lines.append(
            f"| {server} | {size} | {own[0].clients} | {_rate(runs, server, size):.0f} | {p50:.0f} / {p99:.0f} "
            f"| {median(run.rss_mib for run in own):.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    with interruptible("nothing was written"):
        main()
