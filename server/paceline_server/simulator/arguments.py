"""Command-line arguments that describe the pretended machine. `command` and `tune_command` share them."""

from __future__ import annotations

import argparse
import sys

from paceline_server.errors import InvalidConfiguration
from paceline_server.simulator.driver import Pool
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.trace import TraceRequest


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add costs of a step, the size of the KV cache, and the seed."""
    for name, kind, default, about in (
        ("kv-blocks", positive, 4096, "blocks of the KV cache"),
        ("block-size", positive, 16, "tokens in a block"),
        ("step-ms", not_negative, 8.0, "milliseconds that a step costs"),
        ("token-us", not_negative, 30.0, "microseconds for each token of it"),
        ("pair-ns", not_negative, 40.0, "nanoseconds for a token and one before it"),
        ("jitter", not_negative, 0.05, "spread of step times, relative"),
    ):
        metavar = "N" if kind is positive else "X"
        about = f"{about}; default {default:g}"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=about)


def machine(arguments: argparse.Namespace) -> Machine:
    """The machine that was described; said on stderr, since every figure depends on it."""
    print(
        f"machine: {arguments.step_ms:g} ms a step, {arguments.token_us:g} us a token, {arguments.pair_ns:g} ns a pair "
        "(--step-ms, --token-us, --pair-ns; a server's own are in its /metrics: paceline_step_cost_seconds)",
        file=sys.stderr,
    )
    return Machine(arguments.step_ms / 1e3, arguments.token_us / 1e6, arguments.pair_ns / 1e9, arguments.jitter)


def pool(arguments: argparse.Namespace, trace: list[TraceRequest]) -> Pool:
    """The KV cache that was described.

    Raises:
        InvalidConfiguration: it does not hold the longest prompt.
    """
    capacity = arguments.kv_blocks * arguments.block_size
    longest = max(request.prompt_tokens for request in trace)
    if longest + 1 > capacity:
        raise InvalidConfiguration(
            f"{arguments.trace} has a prompt of {longest} tokens, and the KV cache holds {capacity}: "
            "give more --kv-blocks"
        )
    return Pool(arguments.kv_blocks, arguments.block_size)


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    number = float(text)
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text}")
    return number
