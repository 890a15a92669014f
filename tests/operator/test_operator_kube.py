"""What the operator relies on in a real API server, and how its answers become our errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from cluster.api_server import ApiServer
from operators import World, eventually
from reconciling import Killed, Mortal

from paceline_operator.cluster import Apply, Delete, Key, Manifest, PatchStatus, Plan
from paceline_operator.desired import render
from paceline_operator.errors import ChildRefused, ClusterUnavailable, RequestRefused, StaleObservation
from paceline_operator.kube import KubeClient, NamespacedSource
from paceline_operator.kube_cluster import KubeCluster
from paceline_operator.reconcile import decide, reconcile
from paceline_operator.spec import parse_service
from paceline_operator.testing import NOW, llmservice

IMAGE = "registry.example/server:1"


@pytest.fixture
async def client(api_server: ApiServer, crd: None) -> AsyncIterator[KubeClient]:
    """A connection as the cluster's administrator."""
    async with await KubeClient.connect(str(api_server.kubeconfig)) as client:
        yield client


@pytest.fixture
def cluster(client: KubeClient) -> KubeCluster:
    """The seam."""
    return KubeCluster(client)


@pytest.fixture
def key(api_server: ApiServer, crd: None, namespace: str) -> Key:
    """A service that exists and has no children yet."""
    tenants = [
        {"name": name, "keysFrom": {"secretKeyRef": {"name": "api-keys", "key": name}}, "weight": 0.5}
        for name in ("chat", "nightly")
    ]
    spec = {"model": "hf://org/name", "resources": {"limits": {"cpu": "1000m"}}, "tenants": tenants}
    manifest = {"apiVersion": "paceline.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": "demo"}, "spec": spec}
    api_server.kubectl.apply(manifest, namespace=namespace)
    return Key(namespace, "demo")


async def desired_service(cluster: KubeCluster, key: Key) -> Manifest:
    """The Service that belongs to `key`."""
    observed = await cluster.observe(key)
    assert observed.service is not None
    return render(parse_service(observed.service), IMAGE).service


async def test_a_second_pass_finds_nothing_to_do(cluster: KubeCluster, key: Key) -> None:
    """What the API server made of our objects (defaults, quantities) is recognised as what we meant."""
    await reconcile(cluster, key, IMAGE)
    observed = await cluster.observe(key)
    made = {child["kind"] for child in observed.children}
    assert made == {"Deployment", "Service", "ConfigMap", "PodDisruptionBudget"}
    assert not [action for action in decide(observed, IMAGE, NOW).actions if isinstance(action, Apply)]


async def test_a_field_that_is_no_longer_meant_goes_away(api_server: ApiServer, cluster: KubeCluster, key: Key) -> None:
    """Server-side apply drops what we set before and leave out now."""
    secret = '{"spec":{"modelSecretRef":{"name":"hub"}}}'
    api_server.kubectl("patch", "llm", "demo", "-n", key.namespace, "--type=merge", "-p", secret)
    await reconcile(cluster, key, IMAGE)
    assert "HF_TOKEN" in str(api_server.kubectl.get("deployment", "demo", "-n", key.namespace)["spec"])
    nothing = '{"spec":{"modelSecretRef":null}}'
    api_server.kubectl("patch", "llm", "demo", "-n", key.namespace, "--type=merge", "-p", nothing)
    await reconcile(cluster, key, IMAGE)
    assert "HF_TOKEN" not in str(api_server.kubectl.get("deployment", "demo", "-n", key.namespace)["spec"])


async def test_an_operator_that_is_killed_after_any_of_its_writes_is_continued_to_the_same_end(
    api_server: ApiServer, cluster: KubeCluster, crd: None
) -> None:
    ends, left = [], 0
    while not left:
        with api_server.namespace() as namespace:
            key = Key(namespace, "demo")
            service = llmservice(key.name, namespace, autoscaling={"maxReplicas": 3})
            service["metadata"] = {"name": key.name}
            api_server.kubectl.apply(service, namespace=namespace)
            mortal = Mortal(cluster, writes=len(ends))
            with contextlib.suppress(Killed):
                await reconcile(mortal, key, IMAGE)
            left = mortal.left
            await reconcile(cluster, key, IMAGE)
            ends.append(_meant(api_server, key))
    assert len(ends) > 6
    assert ends == ends[:1] * len(ends)


def _meant(api_server: ApiServer, key: Key) -> dict[str, Any]:
    """Everything that the operator makes of a service, but for what the API server adds of its own accord."""
    kinds, ours = "deployment,service,configmap,pdb,hpa", "app.kubernetes.io/managed-by=paceline"
    children = api_server.kubectl.get(kinds, "-n", key.namespace, "-l", ours)["items"]
    made = {f"{one['kind']}/{one['metadata']['name']}": one.get("data") or one["spec"] for one in children}
    for spec in made.values():
        for given in ("clusterIP", "clusterIPs"):
            spec.pop(given, None)
    conditions = api_server.kubectl.get("llm", key.name, "-n", key.namespace)["status"]["conditions"]
    return made | {one["type"]: one["status"] for one in conditions if one["type"] in ("Ready", "Degraded")}


async def test_an_object_that_appeared_meanwhile_is_not_overwritten(
    api_server: ApiServer, cluster: KubeCluster, key: Key
) -> None:
    """It was not there when the plan was made."""
    child = await desired_service(cluster, key)
    api_server.kubectl("create", "service", "clusterip", "demo", "--tcp=80:80", "-n", key.namespace)
    before = api_server.kubectl.get("service", "demo", "-n", key.namespace)
    with pytest.raises(StaleObservation):
        await cluster.execute(key, Plan((Apply(child),)))
    assert api_server.kubectl.get("service", "demo", "-n", key.namespace) == before


async def test_an_object_that_was_swapped_meanwhile_is_left_alone(
    api_server: ApiServer, cluster: KubeCluster, key: Key
) -> None:
    """Neither applied to nor deleted: it has another uid than the one that was seen."""
    child = await desired_service(cluster, key)
    await cluster.execute(key, Plan((Apply(child),)))
    for action in (Apply(child, uid="another"), Delete("v1", "Service", "demo", uid="another")):
        with pytest.raises(StaleObservation):
            await cluster.execute(key, Plan((action,)))
    assert api_server.kubectl.exists("service", "demo", "-n", key.namespace)


async def test_a_status_goes_only_to_the_service_it_is_about(
    api_server: ApiServer, cluster: KubeCluster, key: Key
) -> None:
    """Neither to one that has changed since nor to one of the same name that was made since."""
    observed = await cluster.observe(key)
    assert observed.service is not None
    metadata = observed.service["metadata"]
    patch = PatchStatus(metadata["uid"], {"replicas": 1}, metadata["resourceVersion"])
    api_server.kubectl("label", "llm", "demo", "a=b", "-n", key.namespace)
    for target in (key, Key(key.namespace, "gone")):
        with pytest.raises(StaleObservation):
            await cluster.execute(target, Plan((patch,)))
    observed = await cluster.observe(key)
    assert observed.service is not None
    assert "status" not in observed.service


async def test_deleting_what_is_gone_is_done_already(cluster: KubeCluster, key: Key) -> None:
    """A plan may be carried out twice."""
    await cluster.execute(key, Plan((Delete("v1", "Service", "demo", uid="whatever"),)))


async def test_a_refusal_names_the_child_and_the_reason(cluster: KubeCluster, key: Key) -> None:
    """Invalid by value, and unknown by name."""
    child = await desired_service(cluster, key)
    for change, words in (({"ports": [{"port": 0}]}, "spec.ports[0].port"), ({"portz": []}, "portz")):
        broken = {**child, "spec": {**child["spec"], **change}}
        with pytest.raises(ChildRefused) as refused:
            await cluster.execute(key, Plan((Apply(broken),)))
        assert refused.value.kind == "Service"
        assert words in refused.value.detail


@pytest.mark.parametrize(
    "overlay", [{"nodeSelector": {"gpu": True}}, {"tolerations": {"key": "gpu"}}, {"containers": [{"name": "x"}]}]
)
async def test_a_pod_overlay_that_no_pod_can_have_is_refused_in_the_status(
    api_server: ApiServer, cluster: KubeCluster, key: Key, overlay: dict[str, Any]
) -> None:
    """The CRD lets it through, and server-side apply calls a value of the wrong type an internal error."""
    patch = json.dumps({"spec": {"template": {"spec": overlay}}})
    api_server.kubectl("patch", "llm", "demo", "-n", key.namespace, "--type=merge", "-p", patch)
    await reconcile(cluster, key, IMAGE)
    conditions = api_server.kubectl.get("llm", "demo", "-n", key.namespace)["status"]["conditions"]
    assert {one["reason"] for one in conditions if one["type"] == "Ready"} == {"ChildRefused"}


async def test_pods_that_only_carry_the_label_are_not_counted(
    api_server: ApiServer, cluster: KubeCluster, key: Key
) -> None:
    """Anybody can set a label; the Deployment's ReplicaSets make our pods."""
    await reconcile(cluster, key, IMAGE)
    metadata = {"name": "stranger", "labels": {"paceline.dev/service": "demo"}}
    pod = {"containers": [{"name": "server", "image": "none.invalid/none:1"}]}
    api_server.kubectl.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}, namespace=key.namespace
    )
    async with asyncio.timeout(60):
        while not (pods := (await cluster.observe(key)).pods):
            await asyncio.sleep(0.1)
    (ours,) = pods
    assert ours["metadata"]["name"].startswith("demo-")
    assert ours["kind"] == "Pod"


async def test_a_configuration_that_has_lost_its_label_is_set_right(
    api_server: ApiServer, cluster: KubeCluster, key: Key
) -> None:
    """Its name is taken all the same, and what is in it by then somebody else's."""
    await reconcile(cluster, key, IMAGE)
    (before,) = api_server.kubectl.get("configmap", "-l", "paceline.dev/service=demo", "-n", key.namespace)["items"]
    stripped = json.dumps({"metadata": {"labels": None}, "data": {"engine.yaml": "broken"}})
    name = before["metadata"]["name"]
    api_server.kubectl("patch", "configmap", name, "-n", key.namespace, "--type=merge", "-p", stripped)
    await reconcile(cluster, key, IMAGE)
    after = api_server.kubectl.get("configmap", name, "-n", key.namespace)
    assert (after["data"], after["metadata"]["labels"]) == (before["data"], before["metadata"]["labels"])


async def test_what_is_told_of_a_pod_that_waits_silently_is_read_steps_and_warnings_alike(
    world: World, cluster: KubeCluster, key: Key
) -> None:
    """A warning alone does not tell whether the pod has got further since."""
    await reconcile(cluster, key, IMAGE)
    eventually(world.pod)
    pod = world.pod()
    world.report(pod, state={"waiting": {"reason": "ContainerCreating"}})
    about = {"kind": "Pod", "namespace": key.namespace, "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    for kind, reason in (("Warning", "FailedScheduling"), ("Normal", "Scheduled")):
        told = {"type": kind, "reason": reason, "message": "told", "involvedObject": about}
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": reason.lower()}, **told}
        world.kubectl.apply(event, namespace=key.namespace)
    reasons = {event["reason"] for event in (await cluster.observe(key)).events}
    assert reasons >= {"FailedScheduling", "Scheduled"}


async def test_a_service_that_is_gone_is_observed_as_none(cluster: KubeCluster, key: Key) -> None:
    """And leaves the index."""
    await cluster.observe(key)
    assert key in cluster.index
    gone = Key(key.namespace, "gone")
    assert (await cluster.observe(gone)).service is None
    assert gone not in cluster.index


async def test_an_api_server_that_does_not_answer_is_unavailable(
    api_server: ApiServer, free_port: Callable[[], int], tmp_path: Any
) -> None:
    """The same request may succeed later."""
    text = api_server.kubeconfig.read_text().replace(api_server.url, f"https://127.0.0.1:{free_port()}")
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(text)
    async with await KubeClient.connect(str(elsewhere)) as client:
        with pytest.raises(ClusterUnavailable):
            await client.read_object("/api/v1/namespaces/default")


async def test_a_stranger_is_refused(api_server: ApiServer, tmp_path: Any) -> None:
    """No credentials that help: asking again does not either."""
    kubeconfig = api_server.kubeconfig_for("not-a-token", tmp_path / "kubeconfig")
    async with await KubeClient.connect(str(kubeconfig)) as client:
        with pytest.raises(RequestRefused):
            await client.read_object("/api/v1/namespaces/default")


async def test_a_collection_of_chosen_namespaces_is_read_namespace_by_namespace(client: KubeClient, key: Key) -> None:
    """For an operator that may not list the whole cluster."""
    source = NamespacedSource(client, (key.namespace,))
    services = await source.list_objects("/apis/paceline.dev/v1alpha1/llmservices")
    assert [service["metadata"]["namespace"] for service in services] == [key.namespace]
    assert await client.list_objects("/apis/nobody.dev/v1/things") == []
