"""The `paceline-server` command: `serve` runs the gateway and the engine, `hash-key` makes what is kept of a key.

`simulate` and `tune` are in the simulator's own modules.

Start-up errors end here: their reason goes to stderr and to the termination log (which Kubernetes shows as the
container's termination message), and their exit code tells whether a restart can help.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from paceline_server.config import ServerConfig, load
from paceline_server.engine.client import EngineClient
from paceline_server.errors import StartupError
from paceline_server.gateway.serve import serve_gateway
from paceline_server.gateway.tenants import Source
from paceline_server.keys import hash_key
from paceline_server.logs import configure_logging
from paceline_server.model import store
from paceline_server.simulator import command as simulator
from paceline_server.simulator import tune_command

_TERMINATION_LOG = "/dev/termination-log"  # Kubernetes' default terminationMessagePath
_DRAINED = "Drained: POST /drain was called, and the running requests have ended"
_LAST_PORT = 65535
_TERMINATION_BYTES = 4096  # more is cut by the kubelet


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the process's exit code."""
    arguments = _parser().parse_args(argv)
    configure_logging()
    try:
        return int(arguments.run(arguments))
    except StartupError as error:
        _report(error)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paceline-server", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--version", action="version", version=f"paceline-server {version('paceline-server')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over the OpenAI-compatible API")
    serve.add_argument("--config", type=Path, required=True, help="engine configuration file (YAML)")
    serve.add_argument("--host", help="address to listen on; wins over the file")
    serve.add_argument("--port", type=_port, help="port to listen on; wins over the file; 0 takes a free one")
    serve.set_defaults(run=_serve)
    simulator.add_command(commands)
    tune_command.add_command(commands)
    hasher = commands.add_parser(
        "hash-key",
        help="hash an API key for the configuration (tenants.key_hashes)",
        description="Reads a key from standard input and prints what the configuration keeps of it. "
        "A new one: openssl rand -hex 24 | tee key.txt | paceline-server hash-key",
    )
    hasher.set_defaults(run=_hash_key)
    return parser


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 0 to {_LAST_PORT}")
    return int(text)


def _hash_key(arguments: argparse.Namespace) -> int:
    try:
        print(hash_key(sys.stdin.read().strip()))
    except (ValueError, UnicodeDecodeError) as error:
        print(f"no hash: {error}", file=sys.stderr)
        return 2
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    flags = {("gateway", key): getattr(arguments, key) for key in ("host", "port")}
    given = {key: value for key, value in flags.items() if value is not None}
    config = load(arguments.config, given)
    store.check(config.engine.model_path, store.store_root(os.environ))
    if asyncio.run(_run(config, lambda: load(arguments.config, given).tenants)):
        _leave_word(_DRAINED)
    return 0


async def _run(config: ServerConfig, tenants: Source) -> bool:
    """Gateway and engine side by side: the first to end decides, and the other is ended with it.

    Returns whether POST /drain has ended them.
    """
    engine = EngineClient(config)
    sides = {
        asyncio.create_task(engine.supervise()),
        asyncio.create_task(serve_gateway(config, engine, tenants=tenants)),
    }
    ended, running = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return True in [task.result() for task in ended]


def _report(error: StartupError) -> None:
    text = f"{error.reason}: {error}"
    print(text, file=sys.stderr)
    _leave_word(text)


def _leave_word(text: str) -> None:
    """Say in the termination log why the process ends."""
    target = Path(os.environ.get("PACELINE_TERMINATION_LOG", _TERMINATION_LOG))
    if target.exists():
        with suppress(OSError):  # a log that cannot be written must not hide the error itself
            target.write_bytes(text.encode()[:_TERMINATION_BYTES])
