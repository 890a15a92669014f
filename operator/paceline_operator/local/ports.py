"""Ports for local pods: all of them share this machine's loopback, so each needs its own."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Container

from paceline_operator.cluster import Manifest
from paceline_operator.local.pod import POD_IP

_FIRST, _LAST = 20000, 29999
"""Below the ephemeral ports of Linux (32768) and macOS (49152): no outgoing connection takes one between two runs."""


def free_port(taken: Container[int]) -> int:
    """A port that nothing listens on now and that is not among `taken`.

    The start is random, so that two `paceline up` of this moment hardly look at the same ports.
    """
    start = random.randint(_FIRST, _LAST)
    for port in itertools.chain(range(start, _LAST + 1), range(_FIRST, start)):
        if port not in taken and _is_free(port):
            return port
    raise OSError(f"no port between {_FIRST} and {_LAST} is free")


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a past connection is no obstacle
        try:
            probe.bind((POD_IP, port))
        except OSError:
            return False
    return True


def with_port(pod: Manifest, port: int) -> Manifest:
    """The pod with `port` as the port of its container."""
    server, *others = pod["spec"]["containers"]
    ports = [{**declared, "containerPort": port} for declared in server["ports"]]
    return {**pod, "spec": {**pod["spec"], "containers": [{**server, "ports": ports}, *others]}}
