"""One service under reconciliation on a cluster in dictionaries, and what its user, its pods and its tests do to it."""

from __future__ import annotations

from typing import Any

from paceline_operator.cluster import Apply, Cluster, EmitEvent, Key, Manifest, Plan
from paceline_operator.reconcile import reconcile
from paceline_operator.testing import NOW, FakeCluster, llmservice, make_pod

IMAGE = "registry.example/server:1"
NEW_IMAGE = "registry.example/server:2"
KEY = Key("default", "smollm2")


class Stage:
    """A service on a FakeCluster, and what its user does to it."""

    def __init__(self, **spec: Any) -> None:
        self.cluster = FakeCluster(llmservice(**spec))
        self.image = IMAGE
        self.now = NOW

    @property
    def service(self) -> Manifest:
        """The LLMService as stored."""
        return self.cluster.services[KEY]

    @property
    def deployment(self) -> Manifest:
        """The Deployment as stored."""
        return self.cluster.child(KEY, "Deployment")

    async def reconcile(self) -> list[Any]:
        """One pass; returns what it did."""
        self.cluster.take_actions()
        await reconcile(self.cluster, KEY, self.image, lambda: self.now)
        return self.cluster.take_actions()

    def edit(self, **spec: Any) -> None:
        """A user's change: the generation goes up. None removes a field."""
        self.service["metadata"]["generation"] += 1
        self.service["spec"] = {k: v for k, v in (self.service["spec"] | spec).items() if v is not None}

    def run_pods(self, *pods: Manifest) -> None:
        """What the kubelet reports from now on."""
        self.cluster.pods[KEY] = list(pods)

    def condition(self, kind: str = "Ready") -> dict[str, Any]:
        """One condition as stored."""
        conditions: dict[str, dict[str, Any]] = {c["type"]: c for c in self.service["status"]["conditions"]}
        return conditions[kind]

    def verdict(self, kind: str = "Ready") -> tuple[str, str]:
        """Status and reason of a condition."""
        return self.condition(kind)["status"], self.condition(kind)["reason"]


class Killed(BaseException):
    """SIGKILL: nothing catches it."""


class Mortal:
    """A cluster to which somebody writes who is killed after so many writes."""

    def __init__(self, cluster: Cluster, writes: int) -> None:
        self.observe = cluster.observe
        self._cluster = cluster
        self.left = writes

    async def execute(self, key: Key, plan: Plan) -> None:
        """Carry the plan out, as far as life goes."""
        for action in plan.actions:
            if not self.left:
                raise Killed
            self.left -= 1
            await self._cluster.execute(key, Plan((action,)))


async def serving(**spec: Any) -> Stage:
    """A service whose replicas all serve."""
    stage = Stage(**spec)
    await stage.reconcile()
    replicas = stage.service["spec"].get("replicas", 1)
    stage.run_pods(*(make_pod(stage.deployment, f"pod-{n}", ready=True) for n in range(replicas)))
    await stage.reconcile()
    return stage


def kinds(actions: list[Any], action: type = Apply) -> list[str]:
    """Kinds of the children that were applied or deleted, in order."""
    return [a.manifest["kind"] if isinstance(a, Apply) else a.kind for a in actions if isinstance(a, action)]


def events(actions: list[Any]) -> list[tuple[str, str]]:
    """Type and reason of the events."""
    return [(a.type, a.reason) for a in actions if isinstance(a, EmitEvent)]


def image_of(stage: Stage) -> str:
    """The server's image in the Deployment."""
    image: str = stage.deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    return image
