"""What the API server itself says to an LLMService, before any operator sees it."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.access import KubectlError
from cluster.api_server import ApiServer

pytestmark = pytest.mark.usefixtures("crd")


def llmservice(name: str = "demo", **spec: Any) -> dict[str, Any]:
    """An LLMService as a user writes it."""
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": name},
        "spec": {"model": "hf://org/name", **spec},
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"model": None}, "spec.model: Required value"),
        ({"replica": 2}, 'unknown field "spec.replica"'),
        ({"engine": {"maxModelLn": 512}}, 'unknown field "spec.engine.maxModelLn"'),
        ({"replicas": -1}, "spec.replicas in body should be greater than or equal to 0"),
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas must not exceed maxReplicas"),
        ({"autoscaling": {"minReplicas": 2}}, "spec.autoscaling.maxReplicas: Required value"),
        ({"model": "s3://bucket/x"}, "s3:// and oci:// are not supported; use hf://ORG/NAME, pvc://CLAIM/PATH or"),
        ({"model": "org/name"}, "must be hf://ORG/NAME[@REVISION], pvc://CLAIM/PATH or file:///PATH"),
        ({"model": "pvc://claim/../x"}, "the path of a model must not contain '..'"),
        ({"resources": {"limits": {"memory": "4 GiB"}}}, "spec.resources.limits.memory"),
        ({"engine": {"dtype": "int4"}}, "Unsupported value"),
        ({"engine": {"tracePath": "trace.jsonl"}}, "must begin with /, such as /tmp/NAME"),
        ({"engine": {"diskPath": "blocks", "diskGb": 1, "hostMemoryGb": 1}}, "must begin with /, such as /tmp/NAME"),
        ({"scheduling": {"policy": "lottery"}}, "Unsupported value"),
        (
            {"scheduling": {"admission": "target"}, "engine": {"batcher": "static"}},
            "scheduling.admission target needs engine.batcher continuous",
        ),
        ({"tenants": [{"name": "a"}]}, "nobody could call as this tenant"),
        ({"tenants": [{"name": "a", "anonymous": True, "tiers": ["batch"]}]}, "must be one of tiers"),
        ({"tenants": [{"name": "a", "anonymous": True}, {"name": "b", "anonymous": True}]}, "only one tenant may be"),
        ({"tenants": [{"name": "a", "anonymous": True}, {"name": "a", "anonymous": True}]}, "Duplicate value"),
        ({"tenants": [{"name": "a", "keysFrom": {"secretKeyRef": {"name": "x"}}}]}, "secretKeyRef.key: Required value"),
        ({"tenants": [{"name": "a", "keys": ["sk-plain"]}]}, 'unknown field "spec.tenants[0].keys"'),
        ({"template": {"metadata": {"labels": {"paceline.dev/service": "x"}}}}, "are set by the operator"),
    ],
)
def test_a_mistake_is_refused_with_words_that_help(
    api_server: ApiServer, namespace: str, spec: dict[str, Any], message: str
) -> None:
    """By kubectl apply, as users do it, and nothing is stored."""
    manifest = llmservice(**spec)
    manifest["spec"] = {key: value for key, value in manifest["spec"].items() if value is not None}
    with pytest.raises(KubectlError) as refused:
        api_server.kubectl.apply(manifest, namespace=namespace)
    assert message in refused.value.stderr
    assert not api_server.kubectl.exists("llm", "-n", namespace)


def test_the_model_alone_is_enough_and_applying_again_changes_nothing(api_server: ApiServer, namespace: str) -> None:
    """Defaults are filled in by the API server, so that everybody reads the same."""
    kubectl, here = api_server.kubectl, ("-n", namespace)
    kubectl.apply(llmservice(), namespace=namespace)
    stored = kubectl.get("llm", "demo", *here)
    spec = stored["spec"]
    resources = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "1", "memory": "4Gi"}}
    assert (spec["replicas"], spec["resources"]) == (1, resources)
    assert (spec["drainSeconds"], spec["startupSeconds"]) == (60, 1800)
    kubectl.apply(llmservice(), namespace=namespace)
    assert kubectl.get("llm", "demo", *here)["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]


def test_an_overlay_may_have_any_field_of_a_pod(api_server: ApiServer, namespace: str) -> None:
    """The pod's schema is the API server's business when the Deployment is made."""
    overlay = {"spec": {"nodeSelector": {"a": "b"}, "containers": [{"name": "server", "env": [{"name": "A"}]}]}}
    api_server.kubectl.apply(llmservice(template=overlay), namespace=namespace)
    assert api_server.kubectl.get("llm", "demo", "-n", namespace)["spec"]["template"] == overlay


def test_kubectl_scale_works_and_applying_the_manifest_leaves_the_replicas(
    api_server: ApiServer, namespace: str
) -> None:
    """What the HPA wrote survives a user's next kubectl apply."""
    kubectl, here = api_server.kubectl, ("-n", namespace)
    kubectl.apply(llmservice(), namespace=namespace)
    kubectl("scale", "llm/demo", "--replicas=3", *here)
    kubectl.apply(llmservice(drainSeconds=30), namespace=namespace)
    assert kubectl.get("llm", "demo", *here)["spec"]["replicas"] == 3


def test_the_table_has_the_columns_that_matter(api_server: ApiServer, namespace: str) -> None:
    """`kubectl get llm` answers what is served, whether, how busy it is and why not."""
    kubectl, here = api_server.kubectl, ("-n", namespace)
    kubectl.apply(llmservice(), namespace=namespace)
    header = kubectl("get", "llm", *here).splitlines()[0].split()
    assert header == ["NAME", "MODEL", "READY", "QUEUE", "TTFT-P95", "URL", "REASON", "AGE"]


def test_kubectl_explain_describes_the_fields(api_server: ApiServer) -> None:
    """The reference that a user has at hand."""
    explained = api_server.kubectl("explain", "llmservice.spec.autoscaling.targetQueueDepth")
    assert "Requests waiting and running" in explained
