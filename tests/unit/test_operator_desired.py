"""The rendered children of a service."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.desired import Desired, render
from paceline_operator.desired.config import ENGINE_GROUPS, engine_config
from paceline_operator.spec import EngineSpec, parse_service
from paceline_operator.testing import llmservice

IMAGE = "registry.example/server:1"


def rendered(name: str = "smollm2", **spec: Any) -> Desired:
    """The children of a CPU service with these fields."""
    return render(parse_service(llmservice(name, **spec)), IMAGE)


def pod_of(desired: Desired) -> Manifest:
    """The pod's spec."""
    spec: Manifest = desired.deployment["spec"]["template"]["spec"]
    return spec


def server_of(desired: Desired) -> Manifest:
    """The server's container."""
    container: Manifest = pod_of(desired)["containers"][0]
    return container


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 3},
        {"autoscaling": {"maxReplicas": 4}},
        {"autoscaling": {"maxReplicas": 4, "ttftObjectiveSeconds": 1.5}},
    ],
)
def test_what_does_not_concern_the_pods_makes_no_new_revision(change: dict[str, Any]) -> None:
    """Replicas and autoscaling never roll pods."""
    plain, changed = rendered(), rendered(**change)
    assert changed.revision == plain.revision
    assert changed.deployment["spec"]["template"] == plain.deployment["spec"]["template"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "hf://org/other"},
        {"engine": {"maxModelLen": 512}},
        {"drainSeconds": 5},
        {"image": "other"},
        {"template": {"metadata": {"annotations": {"restarted": "now"}}}},
    ],
)
def test_what_concerns_the_pods_makes_a_new_revision(change: dict[str, Any]) -> None:
    """A changed configuration rolls the pods through its hash on the template."""
    service = parse_service(llmservice(**change))
    assert render(service, service.spec.image or IMAGE).revision != rendered().revision


def test_an_upgrade_of_the_operator_does_not_roll_pods_unnoticed() -> None:
    """The revision of a service is a promise: if this fails, the next release restarts every service.

    Change the expected value only with an entry under "Upgrading" in CHANGELOG.md.
    """
    assert rendered().revision == "a396514b65"


def test_children_belong_to_their_service_and_carry_its_labels() -> None:
    """One controller reference in the same namespace; garbage collection does the rest."""
    for child in rendered("qwen2.5", autoscaling={"maxReplicas": 2}).children:
        metadata = child["metadata"]
        assert metadata["name"].startswith(names.child_name("qwen2.5"))
        assert metadata["namespace"] == "default"
        assert metadata["labels"][names.LABEL_SERVICE] == names.child_name("qwen2.5")
        (owner,) = metadata["ownerReferences"]
        assert (owner["uid"], owner["name"], owner["controller"]) == ("uid-of-qwen2.5", "qwen2.5", True)


def test_every_engine_field_has_its_group_in_the_configuration_file() -> None:
    """A field without a group could not reach the server."""
    assert set(ENGINE_GROUPS) == set(EngineSpec.model_fields)


def test_only_what_the_user_set_is_written_to_the_configuration_file() -> None:
    """Beside what only the operator knows: the model, its names, the device, the drain."""
    service = parse_service(llmservice(engine={"maxModelLen": 512, "maxQueuedRequests": 9, "prefixCaching": False}))
    assert engine_config(service) == {
        "gateway": {"drain_seconds": 60, "backpressure": {"max_queued_requests": 9}},
        "engine": {
            "model_path": "hf://HuggingFaceTB/SmolLM2-135M-Instruct",
            "served_model_names": ["smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"],
            "device": "cpu",
            "max_model_len": 512,
        },
        "kv_cache": {"prefix_caching": False},
    }


def test_the_config_map_holds_the_configuration_file() -> None:
    """It is mounted where the server is told to read it."""
    desired = rendered()
    assert yaml.safe_load(desired.config_map["data"]["engine.yaml"])["engine"]["device"] == "cpu"
    assert server_of(desired)["args"] == ["serve", "--config", "/etc/paceline/engine.yaml"]
    name = desired.config_map["metadata"]["name"]
    assert {"name": "config", "configMap": {"name": name}} in pod_of(desired)["volumes"]


def test_a_gpu_service_is_updated_in_place_and_a_cpu_service_by_surge() -> None:
    """The new pod of a GPU service would wait for the device that the old one holds."""
    gpu = rendered(resources={"limits": {"nvidia.com/gpu": "1"}}).deployment["spec"]["strategy"]["rollingUpdate"]
    cpu = rendered().deployment["spec"]["strategy"]["rollingUpdate"]
    assert (gpu, cpu) == ({"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 1, "maxUnavailable": 0})


def test_the_startup_probe_gates_liveness_for_the_whole_budget() -> None:
    """No pod is killed while it loads within `startupSeconds`."""
    probe = server_of(rendered(startupSeconds=900))["startupProbe"]
    assert probe["httpGet"]["path"] == "/readyz"
    assert probe["periodSeconds"] * probe["failureThreshold"] == 900
    assert rendered(startupSeconds=900).deployment["spec"]["progressDeadlineSeconds"] > 900


def test_the_pod_gets_the_time_it_needs_to_drain() -> None:
    """preStop, drain and exit fit into the grace period."""
    desired = rendered(drainSeconds=30)
    assert server_of(desired)["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert pod_of(desired)["terminationGracePeriodSeconds"] == 5 + 30 + 10


def test_the_pod_runs_with_the_least_rights() -> None:
    """Fits the "restricted" pod security standard."""
    desired = rendered()
    pod, server = pod_of(desired), server_of(desired)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in server["volumeMounts"]} >= {"/tmp", "/models", "/dev/shm"}


def test_the_secret_is_named_never_read() -> None:
    """The kubelet resolves the reference; the operator needs no right on Secrets."""
    env = server_of(rendered(modelSecretRef={"name": "hub"}, handover={"secretRef": {"name": "peers"}}))["env"]
    for name, key in (("hub", "HF_TOKEN"), ("peers", "PACELINE_HANDOVER_SECRET")):
        assert {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} in env


def test_a_model_in_a_claim_is_mounted_read_only() -> None:
    """pvc:// becomes a mount and a folder."""
    desired = rendered(model="pvc://models/llama/8b")
    assert engine_config(parse_service(llmservice(model="pvc://models/llama/8b")))["engine"]["model_path"] == (
        "file:///mnt/model/llama/8b"
    )
    assert {"name": "model", "mountPath": "/mnt/model", "readOnly": True} in server_of(desired)["volumeMounts"]
    claim = {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    assert claim in pod_of(desired)["volumes"]


def test_a_model_on_the_node_is_mounted_where_it_is() -> None:
    """file:// means the same path on the node, in the pod and in the configuration."""
    desired = rendered(model="file:///srv/model")
    assert {"name": "model", "hostPath": {"path": "/srv/model", "type": "Directory"}} in pod_of(desired)["volumes"]
    assert {"name": "model", "mountPath": "/srv/model", "readOnly": True} in server_of(desired)["volumeMounts"]


def test_the_service_sends_to_the_pods_that_the_deployment_owns() -> None:
    """One selector for both."""
    desired = rendered()
    assert desired.service["spec"]["selector"] == desired.deployment["spec"]["selector"]["matchLabels"]
    assert desired.service["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http", "protocol": "TCP"}]


@pytest.mark.parametrize("replicas", [1, 5])
def test_a_cluster_that_empties_nodes_takes_one_pod_at_a_time_and_is_never_stopped(replicas: int) -> None:
    desired = rendered(replicas=replicas)
    spec = desired.disruption_budget["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert spec["selector"] == desired.deployment["spec"]["selector"]


def test_no_autoscaling_no_hpa() -> None:
    """Replicas are then the user's."""
    assert rendered().hpa is None


def test_the_hpa_scales_the_llmservice_on_queue_depth_and_ttft_pressure() -> None:
    """On its own /scale, with two Object metrics of the adapter."""
    hpa = rendered("qwen2.5", autoscaling={"maxReplicas": 4, "targetQueueDepth": 6}).hpa
    assert hpa is not None
    spec, target = hpa["spec"], {"apiVersion": "paceline.dev/v1alpha1", "kind": "LLMService", "name": "qwen2.5"}
    assert (spec["scaleTargetRef"], spec["minReplicas"], spec["maxReplicas"]) == (target, 1, 4)
    metrics = {metric["object"]["metric"]["name"]: metric["object"] for metric in spec["metrics"]}
    assert metrics["queue_depth"]["target"] == {"type": "AverageValue", "averageValue": "6"}
    assert metrics["ttft_pressure"]["target"] == {"type": "Value", "value": "1"}
    assert all(metric["describedObject"] == target for metric in metrics.values())


def tenant(name: str, secret: str = "api-keys", **fields: Any) -> dict[str, Any]:
    """A tenant whose keys are in a Secret, under its name."""
    return {"name": name, "keysFrom": {"secretKeyRef": {"name": secret, "key": name}}, **fields}


def test_the_config_map_names_a_file_for_each_tenant_and_nothing_of_its_secret() -> None:
    """Who may read ConfigMaps learns neither keys nor where they are."""
    desired = rendered(tenants=[tenant("chat", secret="vault-7"), {"name": "free", "anonymous": True}])
    text = desired.config_map["data"][names.CONFIG_FILE]
    chat, free = yaml.safe_load(text)["tenants"]
    assert chat["key_files"] == ["chat"]
    assert "key_files" not in free
    assert "vault-7" not in text


def test_keys_are_mounted_for_reading_only_and_for_nobody_else() -> None:
    pod = pod_of(rendered(tenants=[tenant("chat"), tenant("nightly", secret="other")]))
    (volume,) = (one["projected"] for one in pod["volumes"] if one["name"] == "tenant-keys")
    (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "tenant-keys")
    assert [source["secret"]["name"] for source in volume["sources"]] == ["api-keys", "other"]
    assert volume["defaultMode"] == 0o440
    assert mount["readOnly"]
    assert not [variable for variable in pod["containers"][0]["env"] if "secretKeyRef" in str(variable)]


@pytest.mark.parametrize(
    ("changed", "rolls"),
    [
        ({"weight": 3, "dailyTokens": 5, "prices": {"inputPerMillion": 1, "outputPerMillion": 1}}, False),
        ({"tier": "batch"}, False),
        ({"keysFrom": {"secretKeyRef": {"name": "api-keys", "key": "other"}}}, True),
    ],
    ids=["limits", "tier", "another-secret-key"],
)
def test_a_changed_tenant_rolls_pods_only_where_something_else_has_to_be_mounted(
    changed: dict[str, Any], rolls: bool
) -> None:
    before, after = rendered(tenants=[tenant("chat")]), rendered(tenants=[{**tenant("chat"), **changed}])
    assert before.config_map["data"] != after.config_map["data"] or rolls
    assert (before.revision != after.revision) is rolls
    assert (before.config_map["metadata"]["name"] != after.config_map["metadata"]["name"]) is rolls


def test_scheduling_is_written_as_far_as_it_is_set() -> None:
    spec = {"tiers": {"batch": {"timeoutSeconds": 60}}}
    config = yaml.safe_load(rendered(scheduling=spec).config_map["data"][names.CONFIG_FILE])
    assert config["scheduling"] == {"tiers": {"batch": {"timeout_seconds": 60}}}
    assert "scheduling" not in yaml.safe_load(rendered().config_map["data"][names.CONFIG_FILE])
