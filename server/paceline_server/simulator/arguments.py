"""Command-line arguments that describe the pretended machine. `command` and `tune_command` share them."""

from __future__ import annotations

import argparse

from paceline_server.errors import InvalidConfiguration
from paceline_server.simulator.driver import Pool
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.trace import TraceRequest


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add costs of a step, the size of the KV cache, and the seed."""
    parser.add_argument("--kv-blocks", type=positive, default=4096, metavar="N", help="blocks of the KV cache")
    parser.add_argument("--block-size", type=positive, default=16, metavar="N", help="tokens in a block")
    parser.add_argument("--step-ms", type=not_negative, default=8.0, metavar="X", help="milliseconds that a step costs")
    parser.add_argument(
        "--token-us", type=not_negative, default=30.0, metavar="X", help="microseconds for each token of it"
    )
    parser.add_argument(
        "--pair-ns", type=not_negative, default=40.0, metavar="X", help="nanoseconds for a token and one before it"
    )
    parser.add_argument("--jitter", type=not_negative, default=0.05, metavar="X", help="spread of step times, relative")


def machine(arguments: argparse.Namespace) -> Machine:
    """The machine that was described."""
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
