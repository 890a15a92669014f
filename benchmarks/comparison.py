"""Ours beside its peers: same trace, same weights, same machine, in turns.

    python -m benchmarks.comparison [--quick] [--rounds N] [--servers NAME,…] [--workloads A,B,…]

A: 64 requests of mixed lengths, 16 clients in a closed loop. B: A behind a prefix of 768 tokens that all share.
C: requests like A's at Poisson arrivals, at one rate for all (0.7 of what vLLM does in A). F: the same at 0.7 of what
each server itself does in A. D: prompts of 4,000 to 7,000 tokens, 4 clients. E: one client. Ends of sequence are
ignored everywhere. Every round starts each server anew and warms it with other requests than those measured. A run
counts if all were answered, and in the lengths asked for. Peers are installed on first use. Needs the demo model
(`make model`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import StatisticsError, median
from subprocess import CalledProcessError
from time import perf_counter, process_time

from benchmarks import pages as pages_
from benchmarks import results, roofline, workloads
from benchmarks.environments import CACHE, PEERS, interruptible, say
from benchmarks.load import Record, poisson, spans, summarise
from benchmarks.machine import OthersMeter, float_format, rss_bytes, tree
from benchmarks.peers.huggingface import transformers_serve
from benchmarks.peers.llamacpp import llama_server
from benchmarks.peers.openvino import openvino
from benchmarks.peers.vllm import vllm
from benchmarks.pictures import Point, scatter, timeline
from benchmarks.servers import Driver, Running, Server, paceline, running

STORE = Path(os.environ.get("PACELINE_MODEL_STORE", CACHE / "models"))
MODEL = STORE / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
_LOAD = 0.7  # of the capacity, in open loops
VLLM = "vLLM bf16" if float_format() == "bfloat16" else "vLLM f32"
"""In its best precision here: without instructions for bfloat16 it emulates them, at a few tokens a second."""
_SHOWN = ("paceline int8", "paceline float32", VLLM, "transformers serve")  # in the picture of one run
_QUICK = ("paceline float32", "paceline int8", "transformers serve")
Start = Callable[[Path], Server | Driver]
SERVERS: Mapping[str, Start] = {
    "paceline float32": lambda folder: paceline(MODEL, folder, port=18001, dtype="float32"),
    "paceline bfloat16": lambda folder: paceline(MODEL, folder, port=18002, dtype="bfloat16"),
    "paceline int8": lambda folder: paceline(MODEL, folder, port=18003, dtype="bfloat16", quantization="int8"),
    VLLM: lambda _: vllm(MODEL, port=18004, precision=VLLM.split()[1]),
    "OpenVINO int8": lambda _: openvino(MODEL, weights="int8"),
    "OpenVINO bf16": lambda _: openvino(MODEL, weights="fp16"),
    "OpenVINO f32": lambda _: openvino(MODEL, weights="fp16", precision="f32"),
    "llama.cpp Q4_0": lambda _: llama_server(MODEL, port=18005, precision="Q4_0"),
    "llama.cpp BF16": lambda _: llama_server(MODEL, port=18006, precision="BF16"),
    "transformers serve": lambda _: transformers_serve(MODEL, port=18007, dtype=float_format()),
}


def main() -> None:
    """Run, write benchmarks/results/peers.json after every run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of A, ours and transformers serve")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", default=",".join(SERVERS), help="comma-separated; default: all")
    parser.add_argument("--workloads", default="A,B,C,D,E,F", help="comma-separated; default: all")
    parser.add_argument("--add", action="store_true", help="keep the result file's runs, if they are of this machine")
    options = parser.parse_args()
    names = _QUICK if options.quick else options.servers.split(",")
    letters = ("A",) if options.quick else options.workloads.split(",")
    unknown = [name for name in names if name not in SERVERS]
    if unknown:
        parser.error(f"no such server: {', '.join(unknown)}; there are {', '.join(SERVERS)}")
    mixed = workloads.mixed(MODEL, 64)
    plan = _workloads(letters, mixed)
    roof = roofline.measure()
    described = {letter: _describe(one) for letter, one in plan.items()} | {"roof": roof.describe()}
    name = "quick" if options.quick else "peers"
    workload, runs = results.earlier(name) if options.add else ({}, [])
    first = 1 + max((run.round for run in runs), default=-1)
    for number in range(first, first + (1 if options.quick else options.rounds)):
        for run in _round(names, plan, number, runs):
            runs.append(run)
            shares = _shares_of_roof(roof, mixed, runs)
            results.write(name, workload | described, runs, ratios(runs) | shares)
    path = results.FOLDER / f"{name}.json"
    pages = [] if options.quick else [pages_.fill("peers")]
    print(results.table(runs), f"\nwritten to {path}", *_draw(name, runs), *pages, sep="\n")


def _workloads(letters: Sequence[str], mixed: workloads.Workload) -> dict[str, workloads.Workload]:
    makers: Mapping[str, Callable[[], workloads.Workload]] = {
        "A": lambda: mixed,
        "B": partial(workloads.shared_prefix, MODEL, mixed),
        "C": partial(workloads.reworded, MODEL, mixed, seed=5),
        "D": partial(workloads.long_prompts, MODEL, 8),
        "E": partial(workloads.alone, MODEL, 4),
        "F": partial(workloads.reworded, MODEL, mixed, seed=6),
    }
    return {letter: makers[letter]() for letter in letters}


def _round(
    names: Sequence[str], plan: Mapping[str, workloads.Workload], number: int, before: Sequence[results.Run]
) -> Iterator[results.Run]:
    """Every server through all workloads. `before` may grow meanwhile."""
    turned = [*names[number % len(names) :], *names[: number % len(names)]]  # nobody always comes behind the same one
    order = sorted(turned, key=lambda name: name != VLLM)  # the common rate comes from it
    warm_up = workloads.warm_up(MODEL).requests
    with tempfile.TemporaryDirectory() as scratch:
        for name in order:
            log = PEERS / "logs" / f"{name.replace(' ', '-')}.log"
            say(f"round {number}: starting {name} …")
            try:
                server = SERVERS[name](Path(scratch))
                with running(server, log) as up:
                    up.closed(warm_up, 2)
                    for letter, workload in plan.items():
                        say(f"round {number}: {name}, {letter}: {len(workload.requests)} requests …")
                        rate = _rate(before, {"C": VLLM, "F": name}.get(letter))
                        run = _measure(up, server, letter, workload, number, rate)
                        say(_line(run))
                        yield run
            except (RuntimeError, CalledProcessError) as error:  # the second: a peer that cannot be installed
                say(f"round {number} {name}: {error}")


def _measure(
    up: Running, server: Server | Driver, letter: str, workload: workloads.Workload, number: int, rate: float | None
) -> results.Run:
    meter, begin, used = OthersMeter([os.getpid()]), perf_counter(), process_time()  # the server is our child
    records = _run(up, letter, workload, rate)
    client = (process_time() - used) / (perf_counter() - begin)
    return results.Run(
        server=server.name,
        version=server.version,
        workload=letter,
        round=number,
        figures=summarise(records, clients=None if rate else _clients(letter), rate=rate),
        start_seconds=up.start_seconds,
        rss_mib=rss_bytes(tree(up.pid)) / 2**20,
        others_cores=meter.read(),
        client_cores=client,
        spans=spans(records) if letter == "A" else (),
    )


def _run(up: Running, letter: str, workload: workloads.Workload, rate: float | None) -> list[Record]:
    if rate is not None:
        return up.open(workload.requests, poisson(rate, len(workload.requests)))
    return up.closed(workload.requests, _clients(letter))


def _clients(letter: str) -> int:
    return {"D": 4, "E": 1}.get(letter, 16)


def _draw(name: str, runs: Sequence[results.Run]) -> list[Path]:
    """The pictures of workload A, beside the result file."""
    servers = [name for name in dict.fromkeys(run.server for run in runs) if results.counted(runs, name, "A")]
    if not servers:
        return []
    points = [
        Point(
            server,
            results.median_of(runs, server, "A", "ttft_p50"),
            results.median_of(runs, server, "A", "output_tokens_per_second"),
        )
        for server in servers
    ]
    last = {server: results.counted(runs, server, "A")[-1].spans for server in servers}
    shown = {server: last[server] for server in _SHOWN if server in last}
    title = "16 clients, mixed lengths"
    paths = [scatter(title, points, results.FOLDER / f"{name}-throughput.svg")]
    return [*paths, timeline(shown, results.FOLDER / f"{name}-timeline.svg")] if shown else paths


def _rate(runs: Sequence[results.Run], server: str | None) -> float | None:
    """Requests per second of an open loop: a share of what `server` does in A. None where there is no such server.

    Raises:
        RuntimeError: it has no run of A that counts.
    """
    if server is None:
        return None
    done = results.counted(runs, server, "A")
    if not done:
        raise RuntimeError(f"an open loop needs a run of A by {server}: its rate is a share of what it does there")
    return _LOAD * median(run.figures.requests / run.figures.seconds for run in done)


def _line(run: results.Run) -> str:
    figures = run.figures
    return (
        f"round {run.round} {run.workload} {run.server:20} {figures.output_tokens_per_second:7.1f} tok/s, "
        f"TTFT {figures.ttft_p50:.2f} / {figures.ttft_p99:.2f} s, ITL p99 {figures.itl_p99 * 1e3:.0f} ms, "
        f"errors {figures.errors}, start {run.start_seconds:.1f} s, RSS {run.rss_mib:.0f} MiB, "
        f"others {run.others_cores:.2f}, clients {run.client_cores:.2f} cores"
    )


def ratios(runs: Sequence[results.Run]) -> dict[str, float]:
    """The named numbers: above 1 is in our favour for throughputs; times and sizes are ours over theirs."""
    floats, quantized = ("paceline float32", "paceline bfloat16"), ("paceline int8",)
    ours = (*floats, *quantized)
    peers = tuple(name for name in SERVERS if name not in ours)
    openvino_floats, llama = ("OpenVINO bf16", "OpenVINO f32"), ("llama.cpp Q4_0", "llama.cpp BF16")
    rate, start = "output_tokens_per_second", "start_seconds"
    found = {
        "A_float_over_best_float": _over(runs, "A", rate, floats, (VLLM, *openvino_floats)),
        "A_int8_over_openvino": _over(runs, "A", rate, quantized, ("OpenVINO int8",)),
        "A_over_llamacpp": _over(runs, "A", rate, ours, llama),
        "A_over_transformers": _over(runs, "A", rate, ours, ("transformers serve",)),
        "B_over_best": _over(runs, "B", rate, ours, peers),
        "C_ttft_p99_over_vllm": _over(runs, "C", "ttft_p99", floats, (VLLM,), best=min),
        "C_itl_p99_over_vllm": _over(runs, "C", "itl_p99", floats, (VLLM,), best=min),
        "D_over_best": _over(runs, "D", rate, ours, peers),
        "E_int8_over_llamacpp": _over(runs, "E", rate, quantized, ("llama.cpp Q4_0",)),
        "start_over_vllm": _over(runs, "A", start, floats, (VLLM,), best=min),
        "rss_over_vllm": _over(runs, "A", "rss_mib", floats, (VLLM,), best=min),
    }
    return {name: value for name, value in found.items() if value is not None}


def _shares_of_roof(roof: roofline.Roof, mixed: workloads.Workload, runs: Sequence[results.Run]) -> dict[str, float]:
    """The least time that the machine allows for A over the time that ours took."""
    shares = {}
    for name, weights in (("bf16", "bfloat16"), ("int8", "int8")):
        seconds = _median(runs, f"paceline {weights}", "A", "seconds")
        if seconds is not None:
            least = roofline.least_seconds(roof, MODEL, mixed, 16, weights)
            shares[f"A_share_of_roofline_{name}"] = least / seconds
    return shares


def _over(
    runs: Sequence[results.Run],
    workload: str,
    figure: str,
    ours: Sequence[str],
    peers: Sequence[str],
    *,
    best: Callable[[list[float]], float] = max,
) -> float | None:
    """Our best over the peers' best; None where one side has no run."""
    mine, theirs = ([_median(runs, name, workload, figure) for name in names] for names in (ours, peers))
    mine_there, theirs_there = ([value for value in side if value is not None] for side in (mine, theirs))
    return best(mine_there) / best(theirs_there) if mine_there and theirs_there else None


def _median(runs: Sequence[results.Run], server: str, workload: str, figure: str) -> float | None:
    try:
        return results.median_of(runs, server, workload, figure)
    except StatisticsError:
        return None


def _describe(workload: workloads.Workload) -> dict[str, object]:
    return {
        "name": workload.name,
        "model": MODEL.name,
        "prompt_tokens": [request.prompt_tokens for request in workload.requests],
        "max_tokens": [request.max_tokens for request in workload.requests],
    }


if __name__ == "__main__":
    with interruptible("what was measured so far is in benchmarks/results"):
        main()
