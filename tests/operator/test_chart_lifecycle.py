"""The chart on a real API server: install, upgrade, uninstall, install again. What users have made survives."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.access import KubectlError
from cluster.api_server import ApiServer
from cluster.process import Process, all_stopped, free_port

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/paceline"
PACELINE = Path(sys.executable).parent / "paceline"
NAMESPACE = "paceline-system"
CRD = "customresourcedefinition.apiextensions.k8s.io/llmservices.paceline.dev"
SERVICE = {
    "apiVersion": "paceline.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "demo"},
    "spec": {"model": "hf://a/b"},
}


class Helm:
    """helm on one API server."""

    def __init__(self, program: str, server: ApiServer) -> None:
        self._program = program
        self._environment = os.environ | {"KUBECONFIG": str(server.kubeconfig), "HELM_NAMESPACE": NAMESPACE}

    def __call__(self, *args: str) -> str:
        """Run helm; raises HelmError with what it said."""
        command = [self._program, *args]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise HelmError(done.stderr)
        return done.stdout


class HelmError(Exception):
    """helm failed."""


@pytest.fixture(scope="module")
def own_server(own_api_server: ApiServer) -> ApiServer:
    """The chart owns things that exist once in a cluster, so it gets a cluster of its own."""
    own_api_server.kubectl("create", "namespace", NAMESPACE)
    return own_api_server


@pytest.fixture
def helm(own_server: ApiServer, helm_program: str) -> Iterator[Helm]:
    """helm, on a cluster without the chart; the CRD and all that a test leaves is removed afterwards."""
    helm = Helm(helm_program, own_server)
    yield helm
    with contextlib.suppress(HelmError):
        helm("uninstall", "paceline", "--wait")
    own_server.kubectl("delete", CRD, "--ignore-not-found", "--wait")
    own_server.kubectl("delete", "apiservice", "v1beta1.custom.metrics.k8s.io", "--ignore-not-found")


def everything(server: ApiServer) -> set[str]:
    """All objects of the cluster as kind/namespace/name, without what Kubernetes keeps for itself."""
    kinds = server.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    # kinds that Kubernetes itself fills all the time
    unsteady = {"events", "events.events.k8s.io", "endpoints", "endpointslices.discovery.k8s.io", "componentstatuses"}
    listed = ",".join(sorted(set(kinds) - unsteady))
    items = server.kubectl.get(listed, "--all-namespaces", "--ignore-not-found")["items"]
    return {f"{one['kind']}/{one['metadata'].get('namespace', '')}/{one['metadata']['name']}" for one in items}


def test_uninstall_leaves_the_crd_and_nothing_else(own_server: ApiServer, helm: Helm) -> None:
    before = everything(own_server)
    helm("install", "paceline", str(CHART))
    assert len(everything(own_server) - before) > 10
    helm("uninstall", "paceline", "--wait")
    own_server.kubectl("wait", "--for=delete", "pods", "--all", "-n", NAMESPACE, "--timeout=60s")
    left = everything(own_server) - before
    served_by_the_api_server_itself = {"APIService//v1alpha1.paceline.dev"}  # made and removed with the CRD
    assert left - served_by_the_api_server_itself == {"CustomResourceDefinition//llmservices.paceline.dev"}


def test_services_survive_an_uninstall_and_a_new_installation_takes_the_crd_back(
    own_server: ApiServer, helm: Helm
) -> None:
    helm("install", "paceline", str(CHART))
    own_server.kubectl("wait", "--for=condition=Established", CRD)
    own_server.kubectl.apply(SERVICE)
    uid = own_server.kubectl.get("llmservice", "demo")["metadata"]["uid"]
    helm("uninstall", "paceline", "--wait")
    assert own_server.kubectl.get("llmservice", "demo")["metadata"]["uid"] == uid
    helm("install", "paceline", str(CHART))
    assert own_server.kubectl.get("llmservice", "demo")["metadata"]["uid"] == uid


def older_chart(folder: Path) -> Path:
    """A release of the chart from before `startupSeconds` was thought of."""
    chart = folder / "paceline"
    shutil.copytree(CHART, chart)
    template = chart / "templates/crd.yaml"
    text = template.read_text()
    body = text[text.index("apiVersion:") : text.rindex("{{- end }}")]
    crd = yaml.safe_load(body)
    del crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["startupSeconds"]
    template.write_text(json.dumps(crd))
    return chart


def test_an_upgrade_brings_the_crds_new_fields_and_keeps_what_is_stored(
    own_server: ApiServer, helm: Helm, tmp_path: Path
) -> None:
    """Files in a chart's crds/ folder are installed once and never again: new fields would be pruned for ever."""
    newer = {**SERVICE, "spec": {**SERVICE["spec"], "startupSeconds": 7}}
    helm("install", "paceline", str(older_chart(tmp_path)))
    own_server.kubectl("wait", "--for=condition=Established", CRD)
    own_server.kubectl.apply(SERVICE)
    with pytest.raises(KubectlError, match="startupSeconds"):
        own_server.kubectl.apply(newer)
    helm("upgrade", "paceline", str(CHART))
    own_server.kubectl.apply(newer)
    assert own_server.kubectl.get("llmservice", "demo")["spec"]["startupSeconds"] == 7


def test_an_upgrade_leaves_alone_what_operator_and_adapter_have_written(own_server: ApiServer, helm: Helm) -> None:
    """The certificate, the caBundle and the holder of the lease are not the chart's."""
    here = ("-n", NAMESPACE)
    written: list[tuple[str, str, dict[str, Any]]] = [
        ("secret", "paceline-adapter-tls", {"data": {"tls.crt": "Y2VydA=="}}),
        ("apiservice", "v1beta2.custom.metrics.k8s.io", {"spec": {"caBundle": "Y2E="}}),
        ("lease", "paceline-operator", {"spec": {"holderIdentity": "somebody"}}),
    ]
    helm("install", "paceline", str(CHART))
    for kind, name, patch in written:
        own_server.kubectl("patch", kind, name, *here, "--type=merge", "-p", json.dumps(patch))
    helm("upgrade", "paceline", str(CHART), "--set", "operator.replicas=2")
    for kind, name, patch in written:
        ((section, fields),) = patch.items()
        assert fields.items() <= own_server.kubectl.get(kind, name, *here)[section].items()


def test_a_cluster_whose_custom_metrics_are_anothers_is_left_alone(own_server: ApiServer, helm: Helm) -> None:
    other = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "v1beta1.custom.metrics.k8s.io"},
        "spec": {
            "group": "custom.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"namespace": "monitoring", "name": "prometheus-adapter"},
        },
    }
    own_server.kubectl.apply(other)
    with pytest.raises(HelmError, match=re.escape("--set adapter.enabled=false")):
        helm("install", "paceline", str(CHART))
    helm("install", "paceline", str(CHART), "--set", "adapter.enabled=false")
    assert not own_server.kubectl.exists("apiservice", "v1beta2.custom.metrics.k8s.io")


def test_the_operator_does_its_work_with_the_rights_that_the_chart_gives_it(
    own_server: ApiServer, helm: Helm, tmp_path: Path
) -> None:
    """Children, status, events, lease: nothing that it tries is forbidden, and the empty lease of the chart will do."""
    helm("install", "paceline", str(CHART), "--set", "operator.replicas=0,adapter.enabled=false")
    kubectl = own_server.kubectl
    kubectl("wait", "--for=condition=Established", CRD)
    token = kubectl("create", "token", "paceline-operator", "-n", NAMESPACE).strip()
    kubeconfig = own_server.kubeconfig_for(token, tmp_path / "kubeconfig")
    lease = [f"--lease-namespace={NAMESPACE}", "--lease-name=paceline-operator", "--identity=me"]
    ports = [f"--metrics-port={free_port()}", f"--health-port={free_port()}"]
    operator = Process(
        "operator", [str(PACELINE), "operator", f"--kubeconfig={kubeconfig}", *lease, *ports], tmp_path / "log"
    )
    with all_stopped([operator]):
        kubectl.apply({**SERVICE, "spec": {**SERVICE["spec"], "autoscaling": {"maxReplicas": 2}}})
        children = [f"{kind}/demo" for kind in ("deployment", "service", "pdb", "hpa")]
        for child in children:
            kubectl("wait", "--for=create", child, "--timeout=30s")
        kubectl("wait", "--for=condition=Ready=False", "llmservice/demo", "--timeout=30s")
        kubectl("wait", "--for=jsonpath={.spec.holderIdentity}=me", "lease/paceline-operator", "-n", NAMESPACE)
        about_demo = "involvedObject.kind=LLMService,involvedObject.name=demo"
        operator.wait_until(lambda: bool(kubectl.get("events", "--field-selector", about_demo)["items"]), seconds=30)
        kubectl("patch", "llmservice", "demo", "--type=json", "-p", '[{"op": "remove", "path": "/spec/autoscaling"}]')
        kubectl("wait", "--for=delete", "hpa/demo", "--timeout=30s")
    assert "forbidden" not in operator.log.read_text().lower(), operator.tail()


@pytest.mark.parametrize("sample", sorted((ROOT / "manifests/samples").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sample_is_accepted_as_it_is(own_server: ApiServer, helm: Helm, sample: Path) -> None:
    """With strict validation and the CRD's own rules, which only an API server can check."""
    own_server.kubectl("apply", "-f", str(ROOT / "crds/llmservices.paceline.dev.yaml"))
    own_server.kubectl("wait", "--for=condition=Established", CRD)
    own_server.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", str(sample))


def test_install_yaml_is_accepted_as_it_is_by_kubectl_apply_twice(own_server: ApiServer, helm: Helm) -> None:
    install = str(ROOT / "manifests/install.yaml")
    own_server.kubectl("apply", "-f", install)
    assert "configured" not in own_server.kubectl("apply", "-f", install)
    own_server.kubectl("delete", "-f", install, "--wait")
    own_server.kubectl("create", "namespace", NAMESPACE)
