"""Who may talk to a cluster and how: kubeconfig files, static tokens, and the `kubectl` that tests call.

Used by every source of a cluster.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster.errors import Failed


@dataclass(frozen=True, slots=True)
class Identity:
    """A user of the API server, known by a token that lives as long as the cluster."""

    user: str
    groups: tuple[str, ...]
    token: str

    @classmethod
    def create(cls, user: str, *groups: str) -> Identity:
        """Return an identity with a new random token."""
        return cls(user, groups, secrets.token_hex(16))


def write_token_file(path: Path, identities: Sequence[Identity]) -> None:
    """Write the API server's --token-auth-file."""
    path.touch(mode=0o600)
    lines = [f'{one.token},{one.user},{one.user},"{",".join(one.groups)}"' for one in identities]
    path.write_text("\n".join(lines) + "\n")


def write_kubeconfig(path: Path, url: str, authority: Path, token: str) -> None:
    """Write a kubeconfig of one cluster and one user, with nothing in it that points to another file."""
    bundle = base64.b64encode(authority.read_bytes()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "paceline", "cluster": {"server": url, "certificate-authority-data": bundle}}],
        "users": [{"name": "paceline", "user": {"token": token}}],
        "contexts": [{"name": "paceline", "context": {"cluster": "paceline", "user": "paceline"}}],
        "current-context": "paceline",
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config))


class KubectlError(Failed):
    """kubectl ended with an error; `stderr` is what it said."""

    def __init__(self, command: Sequence[str], stderr: str) -> None:
        super().__init__(f"{' '.join(command)}: {stderr.strip()}")
        self.stderr = stderr


@dataclass(frozen=True, slots=True)
class Kubectl:
    """`kubectl` bound to one cluster: `kubectl("get", "pods")` returns what it prints."""

    program: tuple[str, ...]  # with what must stand before it, e.g. the command that enters a network namespace
    kubeconfig: Path

    def __call__(self, *args: str, input: str | None = None, timeout: float = 120) -> str:
        """Run kubectl and return its output; `input` is what it reads from standard input.

        Raises:
            KubectlError: when kubectl exits with an error.
            subprocess.TimeoutExpired: after `timeout` seconds.
        """
        command = [*self.program, f"--kubeconfig={self.kubeconfig}", *args]
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise KubectlError(("kubectl", *args), done.stderr)
        return done.stdout

    def get(self, *args: str) -> dict[str, Any]:
        """Return what `kubectl get … -o json` prints, parsed."""
        parsed: dict[str, Any] = json.loads(self("get", *args, "-o", "json"))
        return parsed

    def exists(self, *args: str) -> bool:
        """Whether `kubectl get` finds anything."""
        return bool(self("get", *args, "--ignore-not-found", "-o", "name").strip())

    def apply(self, *objects: Mapping[str, Any], namespace: str = "default") -> None:
        """Apply objects in order; `namespace` is for those that don't name theirs.

        As JSON: kubectl takes a text such as 119e45, which PyYAML writes without quotes, for a number. One document
        each: kubectl has the API server validate an object, but validates a List by itself, in words of its own.
        """
        self("apply", "-n", namespace, "-f", "-", input="\n".join(json.dumps(one) for one in objects))

    @contextlib.contextmanager
    def namespace(self, prefix: str = "test") -> Iterator[str]:
        """Yield the name of a new namespace that is ready for pods; it is deleted afterwards, without waiting."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        self("create", "namespace", name)
        try:
            self("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=30s")
            yield name
        finally:
            self("delete", "namespace", name, "--wait=false", "--ignore-not-found")
