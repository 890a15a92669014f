"""Every YAML in manifests/ is what it says: samples are valid LLMServices, and the chart's notes show a valid one."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from paceline_operator import names
from paceline_operator.spec import parse_spec

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "manifests/samples").glob("*.yaml"))


def strict(schema: Any) -> Any:
    """A CRD's schema as strict validation sees it: what is not named is refused, except where the CRD keeps it."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    closed = isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields")
    if closed and schema.get("type") == "object" and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    return result


@pytest.fixture(scope="module")
def spec_schema() -> dict[str, Any]:
    crd = yaml.safe_load((ROOT / "crds/llmservices.paceline.dev.yaml").read_text())
    schema: dict[str, Any] = strict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    return schema


def check_service(document: dict[str, Any], spec_schema: dict[str, Any]) -> None:
    assert (document["apiVersion"], document["kind"]) == (names.API_VERSION, names.KIND)
    assert set(document) <= {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.Draft4Validator(spec_schema).validate(document["spec"])  # what OpenAPI 3.0 is made from
    parse_spec(document["spec"])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_a_valid_service_and_says_what_it_is_for(sample: Path, spec_schema: dict[str, Any]) -> None:
    assert sample.read_text().startswith("# ")
    documents = list(yaml.safe_load_all(sample.read_text()))
    for document in documents:
        check_service(document, spec_schema)


def test_the_minimal_sample_has_the_one_required_field_only() -> None:
    document = yaml.safe_load((ROOT / "manifests/samples/minimal.yaml").read_text())
    assert set(document["spec"]) == {"model"}


def test_samples_can_live_in_one_namespace() -> None:
    documents = [document for path in SAMPLES for document in yaml.safe_load_all(path.read_text())]
    sample_names = [document["metadata"]["name"] for document in documents]
    assert len(sample_names) == len(set(sample_names))


@pytest.mark.parametrize("mistake", [{"modle": "x"}, {"replicas": -1}, {"autoscaling": {"minReplicas": 2}}])
def test_the_check_finds_mistakes(mistake: dict[str, Any], spec_schema: dict[str, Any]) -> None:
    document = yaml.safe_load((ROOT / "manifests/samples/minimal.yaml").read_text())
    document["spec"].update(mistake)
    with pytest.raises(jsonschema.ValidationError):
        check_service(document, spec_schema)


def test_the_service_in_the_charts_notes_is_valid(spec_schema: dict[str, Any]) -> None:
    notes = (ROOT / "helm/paceline/templates/NOTES.txt").read_text()
    shown = re.search(r"<<EOF\n(.*?)\n +EOF", notes, re.DOTALL)
    assert shown
    check_service(yaml.safe_load(textwrap.dedent(shown[1])), spec_schema)


def test_the_kind_configuration_is_one_cluster_with_a_node() -> None:
    config = yaml.safe_load((ROOT / "manifests/kind.yaml").read_text())
    assert (config["kind"], config["apiVersion"]) == ("Cluster", "kind.x-k8s.io/v1alpha4")
    assert config["nodes"]
    for patch in config["nodes"][0]["kubeadmConfigPatches"]:
        assert yaml.safe_load(patch)["kind"] == "ClusterConfiguration"
