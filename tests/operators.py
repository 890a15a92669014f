"""Operators under test: the real process, as `paceline operator` runs it, against a real API server."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.process import Process, free_port, http_ok

IMAGE = "registry.example/server:1"
LEASE_SECONDS = 3.0
PROGRAM = """
import json, logging, sys
from paceline_operator.run import run_operator
from paceline_operator.settings import OperatorSettings
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
settings = json.loads(sys.argv[1])
sys.exit(run_operator(OperatorSettings(**{**settings, "namespaces": tuple(settings["namespaces"])})))
"""


class OperatorProcess:
    """One operator process."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path, **settings: Any) -> None:
        """Start it for one namespace; its lease is there too."""
        self.identity = log.stem
        self._metrics_port, self._health_port = free_port(), free_port()
        known = {
            "kubeconfig": str(kubeconfig),
            "namespaces": [namespace],
            "lease_namespace": namespace,
            "lease_seconds": LEASE_SECONDS,
            "identity": self.identity,
            "server_image": IMAGE,
            "metrics_port": self._metrics_port,
            "health_port": self._health_port,
        }
        self.process = Process("operator", [sys.executable, "-c", PROGRAM, json.dumps(known | settings)], log)
        self.process.wait_until(self.healthy, seconds=30)

    def healthy(self) -> bool:
        """Whether the liveness probe would pass."""
        return http_ok(f"http://127.0.0.1:{self._health_port}/healthz")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def leads(self) -> bool:
        """Whether it holds the lease."""
        return self.metric("paceline_operator_leader") == 1

    def kill(self) -> None:
        """SIGKILL, as a node that loses power."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.stop()

    def stop(self) -> None:
        """SIGTERM, as an upgrade."""
        self.process.stop(grace=10)


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until `condition` holds or stops failing an assertion; the last failure is what the test then shows."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            assert condition(), f"not within {seconds:.0f} s"
            return
        except (AssertionError, KeyError, IndexError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)
