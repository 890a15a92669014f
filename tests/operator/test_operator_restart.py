"""Operators that die, are replaced, or meet each other: nothing is done twice and nothing stays half done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import api_server as api_server_module
from cluster.access import Kubectl
from cluster.api_server import ApiServer
from operators import CHILDREN, LEASE_SECONDS, OperatorProcess, World, eventually

NAMES = [f"svc-{number}" for number in range(10)]
ROOT = Path(__file__).parents[2]

StartOperator = Callable[..., OperatorProcess]


def llmservice(name: str, **spec: Any) -> dict[str, Any]:
    """An LLMService as a user writes it."""
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": name},
        "spec": {"model": "hf://org/name", "resources": {"limits": {"cpu": "1"}}, **spec},
    }


def children(kubectl: Kubectl, namespace: str) -> dict[str, dict[str, Any]]:
    """All children as kind/name → metadata."""
    found = kubectl.get("deployment,service,configmap", "-n", namespace, "-l", "app.kubernetes.io/managed-by=paceline")[
        "items"
    ]
    return {f"{one['kind']}/{one['metadata']['name']}": one["metadata"] for one in found}


def observed_by_all(kubectl: Kubectl, namespace: str, generation: int) -> bool:
    """Whether every service's status is about this generation."""
    services = kubectl.get("llm", "-n", namespace)["items"]
    return all(one.get("status", {}).get("observedGeneration") == generation for one in services)


def test_a_killed_operator_is_continued_by_the_next(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    """Killed amid ten creations, and again amid ten updates: each is done once and completely."""
    kubectl = api_server.kubectl
    first = start_operator("first")
    eventually(first.leads)
    kubectl.apply(*(llmservice(name) for name in NAMES), namespace=namespace)
    first.kill()
    made = children(kubectl, namespace)
    second = start_operator("second")
    eventually(lambda: len(children(kubectl, namespace)) == 3 * len(NAMES))
    eventually(lambda: observed_by_all(kubectl, namespace, 1))
    complete = children(kubectl, namespace)
    assert {name: complete[name]["uid"] for name in made} == {name: one["uid"] for name, one in made.items()}

    kubectl.apply(*(llmservice(name, startupSeconds=5) for name in NAMES), namespace=namespace)
    second.kill()
    start_operator("third")
    eventually(lambda: observed_by_all(kubectl, namespace, 2))
    updated = children(kubectl, namespace)
    assert {name: one["uid"] for name, one in updated.items()} == {name: one["uid"] for name, one in complete.items()}
    generations = {name: one["generation"] for name, one in updated.items() if name.startswith("Deployment")}
    assert generations == {f"Deployment/{name}": 2 for name in NAMES}


def test_only_one_of_two_operators_acts_and_the_other_takes_over(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    """After SIGKILL within the lease's duration, after SIGTERM at once."""
    kubectl = api_server.kubectl
    first = start_operator("first")
    eventually(first.leads)
    second = start_operator("second")
    kubectl.apply(llmservice("one"), namespace=namespace)
    eventually(lambda: len(children(kubectl, namespace)) == 3)
    assert not second.leads()
    assert second.metric("paceline_operator_actions_total") == 0
    first.kill()
    killed = time.monotonic()
    kubectl.apply(llmservice("two"), namespace=namespace)
    eventually(lambda: len(children(kubectl, namespace)) == 6)
    assert time.monotonic() - killed < 3 * LEASE_SECONDS
    third = start_operator("third", lease_seconds=60.0)
    second.stop()
    eventually(third.leads)


def test_an_operator_that_loses_its_lease_ends(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    """It does not argue; its pod starts again and waits."""
    operator = start_operator()
    eventually(operator.leads)
    patch = '{"spec":{"holderIdentity":"somebody-else","renewTime":"2030-01-01T00:00:00.000000Z"}}'
    api_server.kubectl("patch", "lease", "paceline-operator", "-n", namespace, "--type=merge", "-p", patch)
    eventually(lambda: not operator.process.running())
    assert "the lease was taken by somebody-else" in operator.process.tail()


def managers(stored: dict[str, Any], *path: str) -> set[str]:
    """Who owns a field, whatever the subresource they wrote it through."""
    owners = set()
    for entry in stored["metadata"]["managedFields"]:
        fields: Any = entry["fieldsV1"]
        for part in path:
            fields = fields.get(f"f:{part}") if fields is not None else None
        if fields is not None:
            owners.add(entry["manager"])
    return owners


def test_a_service_at_rest_is_not_written_to(world: World, start_operator: StartOperator) -> None:
    """Not even by a full list every second; only the lease's heartbeat goes on."""
    operator = start_operator(resync_seconds=1.0)
    world.apply()
    eventually(lambda: len(world.list(CHILDREN)) == 4)
    world.serve()
    before, actions = world.versions(), operator.metric("paceline_operator_actions_total")
    passes = operator.metric("paceline_operator_reconcile_seconds_count")
    eventually(lambda: operator.metric("paceline_operator_reconcile_seconds_count") >= passes + 4)
    assert world.versions() == before
    assert operator.metric("paceline_operator_actions_total") == actions


def test_replicas_belong_to_whoever_scales(world: World, start_operator: StartOperator) -> None:
    """The operator copies them to the Deployment, through edits and restarts, and never owns them."""
    operator = start_operator()
    world.apply(autoscaling={"maxReplicas": 4})
    eventually(lambda: world.get("deployment")["spec"]["replicas"] == 1)
    world.kubectl("scale", "llm/demo", "--replicas=3", *world.here)
    eventually(lambda: world.get("deployment")["spec"]["replicas"] == 3)
    world.kubectl("label", "llm/demo", "team=a", *world.here)
    world.apply(autoscaling={"maxReplicas": 4}, drainSeconds=30)
    eventually(lambda: world.get("deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 45)
    operator.stop()
    start_operator("second")
    eventually(lambda: world.get("llm")["status"]["observedGeneration"] == world.get("llm")["metadata"]["generation"])
    assert world.get("deployment")["spec"]["replicas"] == world.get("llm")["spec"]["replicas"] == 3
    stored = world.kubectl.get("llm", "demo", *world.here, "--show-managed-fields")
    assert managers(stored, "spec", "replicas") == {"kubectl"}
    assert managers(stored, "status", "replicas") == {"paceline-operator"}


def test_a_new_operator_with_another_default_image_rolls_nothing(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    """An upgrade is no reason to interrupt anybody."""
    kubectl = api_server.kubectl
    old = start_operator("old")
    kubectl.apply(*(llmservice(name) for name in NAMES[:3]), namespace=namespace)
    eventually(lambda: observed_by_all(kubectl, namespace, 1) and len(children(kubectl, namespace)) == 9)
    before = children(kubectl, namespace)
    old.stop()
    new = start_operator("new", server_image="registry.example/server:2")
    eventually(lambda: new.metric("paceline_operator_reconcile_seconds_count") >= 3)
    assert {
        name: one["resourceVersion"] for name, one in children(kubectl, namespace).items() if "Dep" not in name
    } == {name: one["resourceVersion"] for name, one in before.items() if "Dep" not in name}
    generations = {name: one.get("generation") for name, one in children(kubectl, namespace).items()}
    assert generations == {name: one.get("generation") for name, one in before.items()}


@pytest.mark.parametrize("everywhere", [True, False])
def test_the_rights_in_the_chart_are_enough(
    api_server: ApiServer, namespace: str, start_operator: StartOperator, tmp_path: Path, everywhere: bool
) -> None:
    """The operator does its whole work as its own service account, and is refused nothing."""
    kubectl = api_server.kubectl
    empty_lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "paceline-operator"}}
    with service_account(api_server, namespace, tmp_path) as kubeconfig:
        kubectl.apply(empty_lease, namespace=namespace)
        operator = start_operator(kubeconfig=str(kubeconfig), namespaces=[] if everywhere else [namespace])
        kubectl.apply(llmservice("demo", autoscaling={"maxReplicas": 2}), namespace=namespace)
        eventually(lambda: observed_by_all(kubectl, namespace, 1) and len(children(kubectl, namespace)) == 3)
        kubectl.apply(llmservice("demo"), namespace=namespace)
        eventually(lambda: observed_by_all(kubectl, namespace, 2) and not kubectl.exists("hpa", "-n", namespace))
        assert kubectl.get("events", "-n", namespace, "--field-selector=involvedObject.kind=LLMService")["items"]
        kubectl("delete", "lease", "paceline-operator", "-n", namespace)
        kubectl("wait", "--for=create", "lease/paceline-operator", "-n", namespace, "--timeout=30s")
        eventually(operator.leads)
        assert f"system:serviceaccount:{namespace}:operator" not in operator.process.log.read_text()  # … cannot …


@pytest.mark.parametrize("resource", ["pods", "deployments"])
def test_a_right_that_is_missing_is_named_in_the_status_until_it_is_there(
    api_server: ApiServer, world: World, start_operator: StartOperator, tmp_path: Path, resource: str
) -> None:
    """Whoever edits the operator's role reads services, not its log."""
    with service_account(api_server, world.namespace, tmp_path) as kubeconfig:
        grant(api_server.kubectl, world.namespace, chart_rules(without=resource))
        operator = start_operator(kubeconfig=str(kubeconfig), namespaces=[])
        world.apply()
        eventually(lambda: world.verdict("Degraded") == ("True", "Forbidden"))
        conditions = {one["type"]: one for one in world.get("llm")["status"]["conditions"]}
        assert f'resource "{resource}"' in conditions["Degraded"]["message"]
        assert f'in the namespace "{world.namespace}"' in conditions["Degraded"]["message"]
        assert conditions["Ready"]["status"] != "True"
        assert not world.list(CHILDREN)
        grant(api_server.kubectl, world.namespace, chart_rules())
        eventually(lambda: world.verdict("Degraded") == ("False", "AsExpected"), seconds=60)
        world.serve()
        assert operator.leads()


def chart_rules(without: str = "") -> list[dict[str, Any]]:
    """What the chart allows the operator, but for one resource."""
    rules = [
        rule
        for one in yaml.safe_load_all((ROOT / "manifests/install.yaml").read_text())
        if one and one["kind"] in ("ClusterRole", "Role") and one["metadata"]["name"].endswith("operator")
        for rule in one["rules"]
    ]
    assert rules
    left = [{**rule, "resources": [one for one in rule["resources"] if one != without]} for rule in rules]
    return [rule for rule in left if rule["resources"]]


def grant(kubectl: Kubectl, name: str, rules: list[dict[str, Any]]) -> None:
    """Make this the operator's ClusterRole."""
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}}
    kubectl.apply({**role, "rules": rules})


@contextlib.contextmanager
def service_account(api_server: ApiServer, namespace: str, folder: Path) -> Iterator[Path]:
    """The kubeconfig of an account that may do what the chart allows the operator."""
    kubectl = api_server.kubectl
    kubectl("create", "serviceaccount", "operator", "-n", namespace)
    grant(kubectl, namespace, chart_rules())
    account = f"--serviceaccount={namespace}:operator"
    kubectl("create", "clusterrolebinding", namespace, f"--clusterrole={namespace}", account)
    token = kubectl("create", "token", "operator", "-n", namespace).strip()
    try:
        yield api_server.kubeconfig_for(token, folder / "kubeconfig")
    finally:
        kubectl("delete", "clusterrole,clusterrolebinding", namespace)


@pytest.fixture
def bare_server(tmp_path: Path, api_server: ApiServer) -> Iterator[ApiServer]:
    """An API server of its own, without the CRD; where the shared one can run, so can this."""
    state = tmp_path / "bare"
    state.mkdir()
    with api_server_module.running(state) as server:
        yield server


def test_an_operator_that_is_there_before_its_crd_picks_it_up(bare_server: ApiServer, tmp_path: Path) -> None:
    """The order of installation does not matter; until then it is not ready, and leaves the lease to others."""
    kubectl = bare_server.kubectl
    operator = OperatorProcess(
        tmp_path / "early.log", kubeconfig=str(bare_server.kubeconfig), lease_namespace="default"
    )
    try:
        eventually(lambda: "is not installed" in operator.process.log.read_text())
        assert not operator.is_ready()
        assert not kubectl.exists("lease", "paceline-operator", "-n", "default")
        kubectl("apply", "-f", str(ROOT / "crds/llmservices.paceline.dev.yaml"))
        kubectl("wait", "--for=condition=Established", "crd/llmservices.paceline.dev", "--timeout=30s")
        kubectl.apply(llmservice("demo"))
        eventually(lambda: len(children(kubectl, "default")) == 3)
        assert operator.is_ready()
        assert operator.leads()
    finally:
        operator.stop()
