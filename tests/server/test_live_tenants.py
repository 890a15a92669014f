"""A tenant's keys change under the real command: what is in the file is what opens the service, without a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline_operator.cluster import Key, Manifest
from paceline_operator.local.state import StateFolder

SAMPLE = Path(__file__).resolve().parents[2] / "manifests" / "samples" / "tenants.yaml"
NAME = "smollm2-tenants"
CHAT, OTHER_CHAT, NIGHTLY = (f"sk-{number}-of-the-sample-of-tenants" for number in range(3))
START_SECONDS = 240
REREAD_SECONDS = 60  # six times what the server takes; for a machine that does other things too


class TenantsUp:
    """`paceline up` of the sample of tenants, its Secret a folder."""

    def __init__(self, folder: Path, model_store: Path) -> None:
        self.secret = folder / "secrets" / "api-keys"
        self.secret.mkdir(parents=True)
        self.write("chat", CHAT)
        self.write("nightly", NIGHTLY)
        environment = {**os.environ, "XDG_STATE_HOME": str(folder), "PACELINE_MODEL_STORE": str(model_store)}
        self._state = StateFolder.of(Key("default", NAME), environment)
        command = [sys.executable, "-m", "paceline_operator.cli", "up", str(SAMPLE), "--port", "0"]
        command += ["--secrets", str(self.secret.parent)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def write(self, tenant: str, text: str) -> None:
        """Change a key of the Secret, as a kubelet does: whole, or not yet."""
        beside = self.secret / f".{tenant}"
        beside.write_text(text)
        beside.replace(self.secret / tenant)

    def is_ready(self) -> bool:
        """Whether the one pod serves."""
        statuses = [status for pod in self.pods() for status in pod["status"].get("containerStatuses", ())]
        return any(status["ready"] for status in statuses)

    def pods(self) -> tuple[Manifest, ...]:
        """As they are published."""
        snapshot = self._state.read()
        return snapshot.pods if snapshot else ()

    def status_of(self, key: str) -> int:
        """The HTTP status of a request with this key."""
        snapshot = self._state.read()
        assert snapshot is not None, "paceline up has ended"
        body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        request = urllib.request.Request(f"{snapshot.url}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refusal:
            return refusal.code

    def log(self) -> str:
        """What the server has said."""
        (pod,) = self.pods()
        return (self._state.path / "pods" / pod["metadata"]["name"] / "server.log").read_text()


def until(condition: Callable[[], object], seconds: float) -> None:
    """Wait for what other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about in {seconds:g} s"
        time.sleep(0.5)


@pytest.fixture
def up(tmp_path: Path, smollm2_model: Path) -> Iterator[TenantsUp]:
    """The sample, ready."""
    up = TenantsUp(tmp_path, smollm2_model.parents[1])
    try:
        until(up.is_ready, START_SECONDS)
        yield up
    finally:
        up.process.terminate()
        up.process.wait(60)


@pytest.mark.timeout(400)
def test_keys_are_taken_over_when_their_file_changes_and_kept_when_it_makes_no_sense(up: TenantsUp) -> None:
    assert (up.status_of(CHAT), up.status_of(NIGHTLY), up.status_of(OTHER_CHAT)) == (200, 200, 401)
    up.write("chat", OTHER_CHAT)
    until(lambda: up.status_of(OTHER_CHAT) == 200, REREAD_SECONDS)
    assert (up.status_of(CHAT), up.status_of(NIGHTLY)) == (401, 200)

    up.write("chat", f"{NIGHTLY}\n")  # nobody can be two tenants
    until(lambda: "(chat) and tenants[1] (nightly) have a key in common" in up.log(), REREAD_SECONDS)
    assert (up.status_of(OTHER_CHAT), up.status_of(NIGHTLY)) == (200, 200)
    (pod,) = up.pods()
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
