"""Output tokens/s at several numbers of clients: ours against `transformers serve --continuous-batching`.

    python -m benchmarks.serving [--quick]

Every round starts each server anew, warms it with a few requests, and runs the same requests at each number of
clients. Needs the demo model (`make model`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from benchmarks import results, workloads
from benchmarks.load import closed_loop
from benchmarks.machine import OthersMeter, rss_bytes, tree
from benchmarks.servers import CACHE, Running, Server, paceline, running, transformers_serve

STORE = Path(os.environ.get("PACELINE_MODEL_STORE", CACHE / "models"))
MODEL = STORE / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
_REQUESTS_BY_CLIENTS = {1: 6, 4: 16, 16: 48}


def main() -> None:
    """Run, write benchmarks/results/serving.json, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    rounds = 1 if parser.parse_args().quick else 3
    workload = workloads.mixed(MODEL, max(_REQUESTS_BY_CLIENTS.values()))
    runs: list[results.Run] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        servers = [
            paceline(MODEL, folder, port=18001, dtype="float32"),
            paceline(MODEL, folder, port=18003, dtype="bfloat16"),
            paceline(MODEL, folder, port=18004, dtype="bfloat16", quantization="int8"),
            transformers_serve(MODEL),
        ]
        for number in range(rounds):
            for server in servers:
                log = CACHE / "bench" / f"{server.name.replace(' ', '-')}.log"
                with running(server, log) as up:
                    runs += _measure(up, server, workload, number)
    path = results.write("serving", _describe(workload), runs, _ratios(runs, servers))
    print(results.table(runs), f"\nwritten to {path}", sep="\n")


def _measure(up: Running, server: Server, workload: workloads.Workload, number: int) -> list[results.Run]:
    asyncio.run(closed_loop(server.url, workload.requests[:2], 2, server.body))  # warm-up, not counted
    runs = []
    for clients, count in _REQUESTS_BY_CLIENTS.items():
        meter = OthersMeter([os.getpid()])  # the server is our child
        figures = asyncio.run(closed_loop(server.url, workload.requests[:count], clients, server.body))
        run = results.Run(
            server=server.name,
            version=server.version,
            round=number,
            figures=figures,
            start_seconds=up.start_seconds,
            rss_mib=rss_bytes(tree(up.pid)) / 2**20,
            others_cores=meter.read(),
        )
        runs.append(run)
        print(
            f"round {number} {server.name:20} {clients:2} clients: {figures.output_tokens_per_second:7.1f} tok/s, "
            f"TTFT p50 {figures.ttft_p50:.2f} s, errors {figures.errors}, others {run.others_cores:.2f} cores",
            flush=True,
        )
    return runs


def _ratios(runs: list[results.Run], servers: list[Server]) -> dict[str, float]:
    *ours, peer = (server.name for server in servers)
    ratios = {}
    for clients in _REQUESTS_BY_CLIENTS:
        rate = {name: results.median_of(runs, name, clients, "output_tokens_per_second") for name in (*ours, peer)}
        for name in ours:
            key = f"{name.split()[-1]}_over_transformers_serve_at_{clients}"
            ratios[key] = rate[name] / rate[peer]
    return ratios


def _describe(workload: workloads.Workload) -> dict[str, object]:
    return {
        "name": workload.name,
        "model": MODEL.name,
        "requests_by_clients": {str(clients): count for clients, count in _REQUESTS_BY_CLIENTS.items()},
        "prompt_tokens": [request.prompt_tokens for request in workload.requests],
        "max_tokens": [request.max_tokens for request in workload.requests],
    }


if __name__ == "__main__":
    main()
