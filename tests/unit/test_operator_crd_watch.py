"""The operator notices a CRD that is missing or older than itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from paceline_operator.crd import complaint_about

CRD = yaml.safe_load((Path(__file__).parents[2] / "crds/llmservices.paceline.dev.yaml").read_text())


def published(**changes: Any) -> dict[str, Any]:
    """The OpenAPI document that an API server makes of the CRD."""
    schema = copy.deepcopy(CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["properties"]["spec"]["properties"] |= changes
    return {"components": {"schemas": {"dev.paceline.v1alpha1.LLMService": schema}}}


def test_the_crd_of_this_version_is_fine() -> None:
    """The one that lies beside the operator."""
    assert complaint_about(published()) is None


def test_a_missing_crd_is_said_with_its_remedy() -> None:
    """Also while the API server still answers for another version of the group."""
    for document in (None, {}, {"components": {}}):
        complaint = complaint_about(document)
        assert complaint
        assert "is not installed; remedy: kubectl apply" in complaint


def test_fields_that_an_old_crd_would_drop_are_named() -> None:
    """At the top, inside a section, and a section as a whole."""
    document = published()
    spec = document["components"]["schemas"]["dev.paceline.v1alpha1.LLMService"]["properties"]["spec"]["properties"]
    del spec["startupSeconds"], spec["engine"]["properties"]["dtype"], spec["autoscaling"]
    complaint = complaint_about(document)
    assert complaint
    missing = complaint.split("it lacks ")[1].split(";")[0]
    assert set(missing.split(", ")) == {"spec.startupSeconds", "spec.engine.dtype", "spec.autoscaling"}
