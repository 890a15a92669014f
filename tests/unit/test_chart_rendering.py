"""What the chart renders: what its values do, what it refuses, and that it asks for no more rights than are used."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline_operator import names
from paceline_operator.adapter import discover, server
from paceline_operator.adapter.api import METRICS, RESOURCE
from paceline_operator.adapter.settings import AdapterSettings
from paceline_operator.settings import DEFAULT_SERVER_IMAGE, OperatorSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/paceline"
Objects = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def helm(helm_program: str) -> str:
    return helm_program


class Refused(Exception):
    """helm did not render; the message is what it said."""


def render(helm: str, values: dict[str, Any] | None = None) -> Objects:
    """Render the chart: (kind, name) → object."""
    command = [helm, "template", "paceline", str(CHART), "-n", "ops", "--kube-version", "1.30.0", "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(done.stderr)
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


@pytest.fixture(scope="module")
def default(helm: str) -> Objects:
    return render(helm)


def pod_spec(objects: Objects, component: str) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment", f"paceline-{component}"]["spec"]["template"]["spec"]
    return spec


def test_the_chart_passes_its_own_linter(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_files_are_up_to_date(helm: str) -> None:
    command = [sys.executable, "scripts/sync_generated.py", "--check"]
    environment = os.environ | {"PACELINE_KUBE_BIN": str(Path(helm).parent)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `make generate`\n{done.stdout}{done.stderr}"


def test_the_crd_is_kept_on_uninstall_and_can_be_left_out(default: Objects, helm: str) -> None:
    crd = default["CustomResourceDefinition", "llmservices.paceline.dev"]
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    source = yaml.safe_load((ROOT / "crds/llmservices.paceline.dev.yaml").read_text())
    assert crd["spec"] == source["spec"]
    assert ("CustomResourceDefinition", "llmservices.paceline.dev") not in render(helm, {"crd": {"install": False}})


def test_nothing_but_the_crd_is_kept(default: Objects) -> None:
    kept = [key for key, one in default.items() if "helm.sh/resource-policy" in one["metadata"].get("annotations", {})]
    assert kept == [("CustomResourceDefinition", "llmservices.paceline.dev")]


def test_every_namespaced_object_is_in_the_releases_namespace_but_one_binding(default: Objects) -> None:
    elsewhere = [key for key, one in default.items() if one["metadata"].get("namespace", "ops") != "ops"]
    assert elsewhere == [("RoleBinding", "paceline-adapter-ops-authentication-reader")]


@pytest.mark.parametrize("component", ["operator", "adapter"])
def test_pods_run_without_privileges(default: Objects, component: str) -> None:
    spec = pod_spec(default, component)
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"livenessProbe", "readinessProbe", "resources"} <= set(container)


@pytest.mark.parametrize(("component", "settings"), [("operator", OperatorSettings), ("adapter", AdapterSettings)])
def test_flags_are_those_of_the_settings(
    default: Objects, component: str, settings: type[OperatorSettings | AdapterSettings]
) -> None:
    command, *flags = pod_spec(default, component)["containers"][0]["args"]
    fields = {field.replace("_", "-") for field in settings.__dataclass_fields__}
    assert command == component
    assert {flag.removeprefix("--").split("=")[0] for flag in flags} <= fields


def test_a_release_of_another_name_gives_all_its_names_to_the_processes(helm: str) -> None:
    command = [helm, "template", "other", str(CHART), "-n", "ops", "--kube-version", "1.30.0"]
    documents = yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    objects = {(one["kind"], one["metadata"]["name"]): one for one in documents if one}
    adapter = objects["Deployment", "other-adapter"]["spec"]["template"]["spec"]["containers"][0]["args"]
    operator = objects["Deployment", "other-operator"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--service-name=other-adapter", "--secret-name=other-adapter-tls"} <= set(adapter)
    assert "--lease-name=other-operator" in operator
    assert {("Service", "other-adapter"), ("Secret", "other-adapter-tls"), ("Lease", "other-operator")} <= set(objects)


def test_the_server_image_is_the_operators_default(default: Objects) -> None:
    args = pod_spec(default, "operator")["containers"][0]["args"]
    assert f"--server-image={DEFAULT_SERVER_IMAGE}" in args


def test_the_api_service_leads_to_the_adapters_port_and_leaves_the_bundle_to_it(default: Objects) -> None:
    group_version = server.api_service_path().rsplit("/", 1)[1]
    api_service = default["APIService", group_version]["spec"]
    service = default["Service", api_service["service"]["name"]]["spec"]
    (port,) = service["ports"]
    (container,) = pod_spec(default, "adapter")["containers"]
    labels = default["Deployment", "paceline-adapter"]["spec"]["template"]["metadata"]["labels"]
    assert "caBundle" not in api_service
    assert "insecureSkipTLSVerify" not in api_service
    assert api_service["service"]["port"] == port["port"]
    assert port["targetPort"] in {one["name"] for one in container["ports"]}
    assert service["selector"].items() <= labels.items()


def test_secret_and_lease_are_made_empty_so_that_an_upgrade_leaves_their_content_alone(default: Objects) -> None:
    secret = default["Secret", "paceline-adapter-tls"]
    assert not {"data", "stringData", "immutable"} & set(secret)
    assert "spec" not in default["Lease", "paceline-operator"]


def test_without_the_adapter_nothing_of_it_is_left(helm: str) -> None:
    objects = render(helm, {"adapter": {"enabled": False}})
    assert not [key for key in objects if "adapter" in key[1] or "custom.metrics" in key[1]]


def test_without_the_api_service_the_adapter_may_still_set_its_bundle(helm: str) -> None:
    objects = render(helm, {"adapter": {"apiService": {"enabled": False}}})
    assert not [key for key in objects if key[0] == "APIService"]
    assert any("apiservices" in rule["resources"] for rule in objects["ClusterRole", "paceline-adapter"]["rules"])


def test_pods_can_be_given_everything_that_a_cluster_without_images_needs(helm: str) -> None:
    """The end-to-end test runs both from folders of the node."""
    component = {
        "command": ["/venv/bin/paceline"],
        "extraArgs": ["--one"],
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "venv", "hostPath": {"path": "/venv"}}],
        "extraVolumeMounts": [{"name": "venv", "mountPath": "/venv", "readOnly": True}],
        "podLabels": {"l": "1"},
        "podAnnotations": {"a": "1"},
        "priorityClassName": "high",
        "nodeSelector": {"n": "1"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podSecurityContext": {"runAsNonRoot": False, "runAsUser": 0},
        "securityContext": {"readOnlyRootFilesystem": False},
    }
    image = {"repository": "e2e.local/hostroot", "tag": "1", "pullPolicy": "Never"}
    values = {"image": image, "imagePullSecrets": [{"name": "r"}], "operator": component, "adapter": component}
    objects = render(helm, values)
    for name in ("operator", "adapter"):
        template = objects["Deployment", f"paceline-{name}"]["spec"]["template"]
        (container,) = template["spec"]["containers"]
        assert (container["image"], container["imagePullPolicy"]) == ("e2e.local/hostroot:1", "Never")
        assert container["command"] == ["/venv/bin/paceline"]
        assert container["args"][0] == name
        assert container["args"][-1] == "--one"
        assert component["extraEnv"][0] in container["env"]
        assert component["extraVolumes"][0] in template["spec"]["volumes"]
        assert component["extraVolumeMounts"][0] in container["volumeMounts"]
        assert template["metadata"]["labels"]["l"] == template["metadata"]["annotations"]["a"] == "1"
        assert template["spec"]["imagePullSecrets"] == [{"name": "r"}]
        for field in ("priorityClassName", "nodeSelector", "tolerations", "affinity"):
            assert template["spec"][field] == component[field]
        assert template["spec"]["securityContext"]["runAsUser"] == 0
        assert container["securityContext"]["readOnlyRootFilesystem"] is False


@pytest.mark.parametrize(
    ("values", "names_it"),
    [
        ({"operatr": {}}, "operatr"),
        ({"operator": {"replica": 2}}, "replica"),
        ({"operator": {"replicas": -1}}, "replicas"),
        ({"operator": {"replicas": "2"}}, "replicas"),
        ({"operator": {"namespaces": ["a"]}}, "namespaces"),
        ({"image": {"repository": ""}}, "repository"),
        ({"image": {"pullPolicy": "never"}}, "pullPolicy"),
        ({"adapter": {"apiService": {"enabled": "no"}}}, "enabled"),
        ({"adapter": {"resources": {"limit": {}}}}, "limit"),
        ({"imagePullSecrets": ["registry"]}, "imagePullSecrets"),
        ({"operator": {"extraEnv": [{"value": "x"}]}}, "extraEnv"),
        ({"networkPolicy": {"from": []}}, "from"),
        ({"podMonitor": {"interval": "often"}}, "interval"),
    ],
)
def test_a_mistake_in_the_values_is_refused_by_name(helm: str, values: dict[str, Any], names_it: str) -> None:
    with pytest.raises(Refused, match=re.escape(names_it)):
        render(helm, values)


def test_policies_and_monitors_are_there_on_demand_only(default: Objects) -> None:
    """Not every cluster has their kinds, and none needs a Prometheus."""
    assert not {"NetworkPolicy", "PodMonitor"} & {kind for kind, _ in default}


def test_a_network_policy_lets_in_what_probes_and_asks_operator_and_adapter_and_nothing_else(helm: str) -> None:
    prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    objects = render(helm, {"networkPolicy": {"enabled": True, "metricsFrom": prometheus}})
    for component in ("operator", "adapter"):
        policy = objects["NetworkPolicy", f"paceline-{component}"]["spec"]
        template = objects["Deployment", f"paceline-{component}"]["spec"]["template"]
        named = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {rule["ports"][0]["port"] for rule in policy["ingress"]} == named
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert policy["policyTypes"] == ["Ingress"]
        assert [rule["from"] for rule in policy["ingress"] if "from" in rule] == (
            [prometheus] if component == "operator" else []
        )


def test_monitors_select_the_operator_and_the_pods_of_every_service(helm: str) -> None:
    monitor = {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}}
    objects = render(helm, {"podMonitor": monitor})
    servers, operator = (objects["PodMonitor", f"paceline-{name}"] for name in ("servers", "operator"))
    for one in (servers, operator):
        assert one["metadata"]["labels"]["release"] == "prometheus"
        assert one["spec"]["podMetricsEndpoints"][0]["interval"] == "30s"
    assert servers["spec"]["namespaceSelector"] == {"any": True}
    assert servers["spec"]["selector"]["matchLabels"].items() <= names.common_labels("any").items()
    assert servers["spec"]["podMetricsEndpoints"][0]["port"] == names.PORT_NAME
    pods = objects["Deployment", "paceline-operator"]["spec"]["template"]
    assert operator["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert operator["spec"]["podMetricsEndpoints"][0]["port"] in str(pods["spec"]["containers"][0]["ports"])


def test_every_value_has_a_default_and_is_in_the_schema() -> None:
    """The two component sections are alike but for what only the adapter has."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(values) == set(schema) - {"global"}
    for section in set(values) - {"imagePullSecrets"}:
        assert set(values[section]) == set(schema[section]["properties"])
        assert schema[section]["additionalProperties"] is False
    assert set(values["adapter"]) - set(values["operator"]) == {"enabled", "apiService"}


def rules_of(objects: Objects, component: str) -> set[tuple[str, str, str, tuple[str, ...]]]:
    """All rights of a component: (group, resource, verb, resource names)."""
    rights = set()
    for kind in ("ClusterRole", "Role"):
        for rule in objects[kind, f"paceline-{component}"]["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    named = tuple(rule.get("resourceNames", ()))
                    rights |= {(group, resource, verb, named) for verb in rule["verbs"]}
    return rights


def test_the_adapter_may_do_what_it_does_and_nothing_else(default: Objects) -> None:
    assert discover.SERVICES_PATH == "/apis/paceline.dev/v1alpha1/llmservices"
    assert rules_of(default, "adapter") == {
        (names.GROUP, names.PLURAL, "get", ()),
        (names.GROUP, names.PLURAL, "list", ()),
        ("", "pods", "list", ()),
        ("apiregistration.k8s.io", "apiservices", "get", ("v1beta2.custom.metrics.k8s.io",)),
        ("apiregistration.k8s.io", "apiservices", "patch", ("v1beta2.custom.metrics.k8s.io",)),
        ("", "secrets", "get", ("paceline-adapter-tls",)),
        ("", "secrets", "patch", ("paceline-adapter-tls",)),
    }


@pytest.mark.parametrize("component", ["operator", "adapter"])
def test_no_right_is_a_wildcard_and_no_role_gives_others_rights(default: Objects, component: str) -> None:
    rights = rules_of(default, component)
    assert not [right for right in rights if "*" in right[:3]]
    assert not [
        right for right in rights if right[0] == "rbac.authorization.k8s.io" or right[2] in ("bind", "escalate")
    ]
    assert not [right for right in rights if right[1] == "secrets" and not right[3]]


def test_the_operator_never_writes_the_users_specification(default: Objects) -> None:
    verbs = {right[2] for right in rules_of(default, "operator") if right[1] == names.PLURAL}
    assert verbs == {"get", "list", "watch"}


def test_the_operator_may_make_its_lease_again_in_its_own_namespace_alone(default: Objects) -> None:
    """One that somebody has deleted: the chart makes it once, and a right to create cannot be given by name."""
    lease = ("coordination.k8s.io", "leases")
    name = ("paceline-operator",)
    rights = {right[2:] for right in rules_of(default, "operator") if right[:2] == lease}
    assert rights == {("get", name), ("update", name), ("create", ())}
    assert "leases" not in str(default["ClusterRole", "paceline-operator"]["rules"])


def test_the_hpa_may_read_exactly_the_metrics_that_the_adapter_serves(default: Objects) -> None:
    (rule,) = default["ClusterRole", "paceline-adapter-metrics-reader"]["rules"]
    assert set(rule["resources"]) == {f"{RESOURCE}/{metric}" for metric in METRICS}
    assert rule["verbs"] == ["get"]
