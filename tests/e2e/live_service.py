"""An LLMService on a cluster, as a user handles it: apply, wait, look, ask, delete. Used by the end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster.hostroot import SOURCE_TREE
from cluster.seam import Cluster

SAMPLE = SOURCE_TREE / "manifests" / "samples" / "smollm2.yaml"
CLIENT = Path(__file__).with_name("openai_client.py")
PORT = 8000
ANSWER_SECONDS = 600  # for two cores that have other work too


@dataclass(frozen=True, slots=True)
class LiveService:
    """One LLMService; it exists once `apply` was called."""

    cluster: Cluster
    namespace: str
    manifest: dict[str, Any]

    @classmethod
    def sample(cls, cluster: Cluster, namespace: str, *overlays: Mapping[str, Any]) -> LiveService:
        """Return the sample's LLMService with overlays merged into its `spec`."""
        manifest = yaml.safe_load(SAMPLE.read_text())
        for overlay in overlays:
            manifest["spec"] = merged(manifest["spec"], overlay)
        return cls(cluster, namespace, manifest)

    @property
    def name(self) -> str:
        """Name of the LLMService, and of its children."""
        name: str = self.manifest["metadata"]["name"]
        return name

    def changed(self, **spec: Any) -> LiveService:
        """Return the same service with these keys of its `spec` changed; `apply` it to make it so."""
        return LiveService(self.cluster, self.namespace, {**self.manifest, "spec": {**self.manifest["spec"], **spec}})

    def apply(self) -> None:
        """`kubectl apply` it."""
        self.kubectl("apply", "-f", "-", input=json.dumps(self.manifest))

    def kubectl(self, *args: str, input: str | None = None, timeout: float = 300) -> str:
        """Run kubectl in the service's namespace."""
        return self.cluster.kubectl(*args, "-n", self.namespace, input=input, timeout=timeout)

    def wait(self, what: str, seconds: int) -> None:
        """`kubectl wait` for something of the LLMService, such as `condition=Ready` or `jsonpath={.status.replicas}=2`.

        Raises:
            KubectlError: when it does not come in time.
        """
        self.kubectl("wait", f"--for={what}", f"llm/{self.name}", f"--timeout={seconds}s", timeout=seconds + 30)

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition of the status; empty while there is none."""
        status = self.cluster.kubectl.get(f"llm/{self.name}", "-n", self.namespace).get("status", {})
        return next((one for one in status.get("conditions", ()) if one["type"] == kind), {})

    def pods(self) -> list[dict[str, Any]]:
        """Return the service's pods, the oldest first."""
        selector = f"paceline.dev/service={self.name}"
        pods: list[dict[str, Any]] = self.cluster.kubectl.get("pods", "-n", self.namespace, "-l", selector)["items"]
        return sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def ask(self, *requests: Mapping[str, Any], key: str = "none") -> list[dict[str, Any]]:
        """Send chat requests through the Service with the official client and this API key; returns its answers."""
        with self.asking(*requests, key=key) as questions:
            return questions.answers()

    @contextlib.contextmanager
    def asking(
        self, *requests: Mapping[str, Any], pod: Mapping[str, Any] | None = None, key: str = "none"
    ) -> Iterator[Questions]:
        """Send chat requests in the background: through the Service, or to one of its pods."""
        own_url = f"http://{pod['status']['podIP']}:{PORT}" if pod else None
        reach = contextlib.nullcontext(own_url) if own_url else self.cluster.reach(self.namespace, self.name, PORT)
        with reach as url, self.cluster.start_inside(sys.executable, str(CLIENT)) as client:
            order = {"url": url, "key": key, "requests": [{"model": self.name, **request} for request in requests]}
            assert client.stdin is not None
            client.stdin.write(json.dumps(order))
            client.stdin.close()
            client.stdin = None  # communicate() must not touch it again
            try:
                yield Questions(client)
            finally:
                client.kill()


@dataclass(frozen=True, slots=True)
class Questions:
    """Requests that a client has sent."""

    client: subprocess.Popen[str]

    def all_answered(self) -> bool:
        """Whether the last answer is complete."""
        return self.client.poll() is not None

    def answers(self) -> list[dict[str, Any]]:
        """Wait for all answers and return them, in the order of the requests, as `openai_client` prints them."""
        said, complaint = self.client.communicate(timeout=ANSWER_SECONDS)
        assert self.client.returncode == 0, complaint
        parsed: list[dict[str, Any]] = json.loads(said)
        return parsed


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `overlay` merged in, mapping by mapping."""
    result = dict(base)
    for key, value in overlay.items():
        known = result.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            value = merged(known, value)
        result[key] = value
    return result


def eventually(look: Callable[[], Any], seconds: float) -> Any:
    """Return what `look` returns, once it is true; looks twice a second.

    Raises:
        AssertionError: with the last thing seen, after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s; last seen: {seen!r}"
        time.sleep(0.5)
    return seen


def settled(look: Callable[[], object], expected: object, seconds: float) -> object:
    """Return what `look` returns once it is `expected`, or what it is after `seconds`, for the caller to compare."""
    deadline = time.monotonic() + seconds
    while (seen := look()) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    return seen


def everything(cluster: Cluster, *, but: Sequence[str] = ("Event", "Lease")) -> set[str]:
    """Return every object of the cluster as `Kind namespace/name`, without the kinds that come and go by themselves."""
    kubectl = cluster.kubectl
    resources = kubectl("api-resources", "--verbs=list", "--output=name").split()
    objects = kubectl.get(",".join(resources), "--all-namespaces")["items"]
    names = {
        f"{one['kind']} {one['metadata'].get('namespace', '')}/{one['metadata']['name']}"
        for one in objects
        if one["kind"] not in but
    }
    return names
