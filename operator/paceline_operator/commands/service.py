"""How a command names an LLMService of this machine. Used by `down` and `logs`."""

from __future__ import annotations

import argparse
import os

from paceline_operator.cluster import Key
from paceline_operator.local.state import StateFolder


def add_service(parser: argparse.ArgumentParser) -> None:
    """Add the arguments NAME and --namespace."""
    parser.add_argument("name", metavar="NAME", help="name of the LLMService")
    parser.add_argument("-n", "--namespace", default="default", help="its namespace (default: default)")


def chosen_folder(chosen: argparse.Namespace) -> StateFolder:
    """The state of the service that was named."""
    return StateFolder.of(Key(chosen.namespace, chosen.name), os.environ)


def full_name(chosen: argparse.Namespace) -> str:
    """Namespace and name of the service that was named: a namesake may run in another namespace."""
    return f"{chosen.namespace}/{chosen.name}"
