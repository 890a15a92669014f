"""`paceline-server simulate TRACE`: what would a policy have done to a recorded trace? `cli` registers it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from paceline_server.config import SchedulingConfig
from paceline_server.engine.policies import ttft_targets
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.errors import InvalidConfiguration
from paceline_server.simulator import arguments as options
from paceline_server.simulator.driver import Outcome, Simulation
from paceline_server.simulator.progress import Progress
from paceline_server.simulator.report import as_json, rows, table
from paceline_server.simulator.trace import read

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
    parser.add_argument(
        "--max-batch-size", type=options.positive, default=64, metavar="N", help="sequences that run together"
    )
    parser.add_argument(
        "--max-tokens-in-batch", type=options.positive, default=512, metavar="N", help="tokens of a step"
    )
    options.add_machine(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--json", action="store_true", help="figures as JSON, by policy")
    parser.set_defaults(run=simulate)


def simulate(arguments: argparse.Namespace) -> int:
    """Run every policy on the trace and print its figures; returns the exit code."""
    trace = read(arguments.trace)
    limits = _limits(arguments)
    machine, pool = options.machine(arguments), options.pool(arguments, trace)
    figures = {}
    for policy in arguments.policy or ["slo"]:
        scheduling = SchedulingConfig(policy=policy, admission=arguments.admission)
        outcomes = _run(Simulation(trace, machine, pool, limits, scheduling, arguments.seed), policy)
        figures[policy] = rows(outcomes, ttft_targets(scheduling.tiers))
    if arguments.json:
        print(json.dumps({policy: as_json(found) for policy, found in figures.items()}, indent=1))
    else:
        print("\n\n".join(table(found, policy) for policy, found in figures.items()))
    return 0


def _run(simulation: Simulation, policy: str) -> list[Outcome]:
    total = len(simulation.outcomes)
    with Progress(sys.stderr) as progress:
        return simulation.run(lambda arrived: progress.show(f"{policy}: {arrived} of {total} requests have come"))


def _limits(arguments: argparse.Namespace) -> SchedulerLimits:
    if arguments.max_tokens_in_batch < arguments.max_batch_size:
        raise InvalidConfiguration(
            f"--max-tokens-in-batch ({arguments.max_tokens_in_batch}) must be at least --max-batch-size "
            f"({arguments.max_batch_size}): every running sequence decodes one token a step"
        )
    return SchedulerLimits(arguments.max_batch_size, arguments.max_tokens_in_batch)
