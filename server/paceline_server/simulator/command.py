"""`paceline-server simulate TRACE`: what would a policy have done to a recorded trace? `cli` registers it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import get_args

from paceline_server.config import SchedulingConfig
from paceline_server.engine.policies import ttft_targets
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.errors import InvalidConfiguration
from paceline_server.simulator.driver import Pool, Simulation
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.report import as_json, rows, table
from paceline_server.simulator.trace import TraceRequest, read

_POLICIES = get_args(SchedulingConfig.model_fields["policy"].annotation)
_ADMISSIONS = get_args(SchedulingConfig.model_fields["admission"].annotation)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `simulate`."""
    parser = commands.add_parser(
        "simulate",
        help="try scheduling policies on a recorded trace",
        description="Run a trace through the engine's scheduler on a pretended machine. The machine's costs are those "
        "that a server measures of its steps; a trace is one JSON object a line (docs/reference/simulate.md).",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file of requests, JSON lines")
    parser.add_argument("--policy", action="append", choices=_POLICIES, help="may be given several times; default slo")
    parser.add_argument("--admission", choices=_ADMISSIONS, default="timeout", help="as scheduling.admission")
    parser.add_argument("--max-batch-size", type=_positive, default=64, metavar="N", help="sequences that run together")
    parser.add_argument("--max-tokens-in-batch", type=_positive, default=512, metavar="N", help="tokens of a step")
    parser.add_argument("--kv-blocks", type=_positive, default=4096, metavar="N", help="blocks of the KV cache")
    parser.add_argument("--block-size", type=_positive, default=16, metavar="N", help="tokens in a block")
    parser.add_argument(
        "--step-ms", type=_not_negative, default=8.0, metavar="X", help="milliseconds that a step costs"
    )
    parser.add_argument(
        "--token-us", type=_not_negative, default=30.0, metavar="X", help="microseconds for each token of it"
    )
    parser.add_argument(
        "--pair-ns", type=_not_negative, default=40.0, metavar="X", help="nanoseconds for a token and one before it"
    )
    parser.add_argument(
        "--jitter", type=_not_negative, default=0.05, metavar="X", help="spread of step times, relative"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--json", action="store_true", help="figures as JSON, by policy")
    parser.set_defaults(run=simulate)


def simulate(arguments: argparse.Namespace) -> int:
    """Run every policy on the trace and print its figures; returns the exit code."""
    trace = read(arguments.trace)
    limits = _limits(arguments)
    _refuse_too_large(trace, arguments)
    figures = {}
    for policy in arguments.policy or ["slo"]:
        scheduling = SchedulingConfig(policy=policy, admission=arguments.admission)
        simulation = Simulation(trace, _machine(arguments), _pool(arguments), limits, scheduling, arguments.seed)
        figures[policy] = rows(simulation.run(), ttft_targets(scheduling.tiers))
    if arguments.json:
        print(json.dumps({policy: as_json(found) for policy, found in figures.items()}, indent=1))
    else:
        print("\n\n".join(table(found, policy) for policy, found in figures.items()))
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text}")
    return number


def _limits(arguments: argparse.Namespace) -> SchedulerLimits:
    if arguments.max_tokens_in_batch < arguments.max_batch_size:
        raise InvalidConfiguration(
            f"--max-tokens-in-batch ({arguments.max_tokens_in_batch}) must be at least --max-batch-size "
            f"({arguments.max_batch_size}): every running sequence decodes one token a step"
        )
    return SchedulerLimits(arguments.max_batch_size, arguments.max_tokens_in_batch)


def _machine(arguments: argparse.Namespace) -> Machine:
    return Machine(arguments.step_ms / 1e3, arguments.token_us / 1e6, arguments.pair_ns / 1e9, arguments.jitter)


def _pool(arguments: argparse.Namespace) -> Pool:
    return Pool(arguments.kv_blocks, arguments.block_size)


def _refuse_too_large(trace: list[TraceRequest], arguments: argparse.Namespace) -> None:
    capacity = arguments.kv_blocks * arguments.block_size
    longest = max(request.prompt_tokens for request in trace)
    if longest + 1 > capacity:
        raise InvalidConfiguration(
            f"{arguments.trace} has a prompt of {longest} tokens, and the KV cache holds {capacity}: "
            "give more --kv-blocks"
        )
