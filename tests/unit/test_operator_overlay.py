"""The pod overlay merges as a strategic merge patch does."""

from __future__ import annotations

from typing import Any

from paceline_operator.desired.overlay import merge_pod
from paceline_operator.template import TemplateSpec

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}, "annotations": {}},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1},
        "containers": [
            {
                "name": "server",
                "args": ["serve"],
                "env": [{"name": "HOME", "value": "/tmp"}],
                "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                "ports": [{"containerPort": 8000, "name": "http"}],
            }
        ],
        "volumes": [{"name": "models", "emptyDir": {}}],
    },
}


def merged(**overlay: Any) -> dict[str, Any]:
    """The base with this overlay's spec merged in."""
    spec: dict[str, Any] = merge_pod(BASE, TemplateSpec.model_validate({"spec": overlay}))["spec"]
    return spec


def test_the_server_container_is_merged_by_name() -> None:
    """Scalars and plain lists are replaced, the rest of the container stays."""
    (server,) = merged(containers=[{"name": "server", "args": ["other"], "workingDir": "/x"}])["containers"]
    assert (server["args"], server["workingDir"]) == (["other"], "/x")
    assert server["ports"] == BASE["spec"]["containers"][0]["ports"]


def test_another_container_is_added_after_the_server() -> None:
    """A sidecar does not become the first container."""
    containers = merged(containers=[{"name": "sidecar", "image": "x"}])["containers"]
    assert [container["name"] for container in containers] == ["server", "sidecar"]


def test_a_volume_of_the_same_name_is_replaced_whole() -> None:
    """Merged deeply it would have two sources, which the API server refuses."""
    assert merged(volumes=[{"name": "models", "hostPath": {"path": "/m"}}])["volumes"] == [
        {"name": "models", "hostPath": {"path": "/m"}}
    ]


def test_variables_are_replaced_by_name_and_mounts_by_path() -> None:
    """A variable from a Secret replaces one with a value; one volume may be mounted twice."""
    source = {"name": "HOME", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    mounts = [{"name": "models", "mountPath": "/models", "readOnly": True}, {"name": "models", "mountPath": "/again"}]
    (server,) = merged(containers=[{"name": "server", "env": [source], "volumeMounts": mounts}])["containers"]
    assert (server["env"], server["volumeMounts"]) == ([source], mounts)


def test_null_removes_a_field() -> None:
    """The only way to take away what we set."""
    assert merged(securityContext={"runAsUser": None})["securityContext"] == {"runAsNonRoot": True}


def test_labels_and_annotations_are_added() -> None:
    """The overlay's metadata goes to the pods."""
    overlay = TemplateSpec.model_validate({"metadata": {"labels": {"b": "2"}, "annotations": {"c": "3"}}})
    assert merge_pod(BASE, overlay)["metadata"] == {"labels": {"a": "1", "b": "2"}, "annotations": {"c": "3"}}


def test_merging_changes_neither_argument() -> None:
    """The rendered template is shared with the revision's hash."""
    before = str(BASE)
    merged(containers=[{"name": "server", "env": [{"name": "A", "value": "1"}]}], volumes=[{"name": "v"}])
    assert str(BASE) == before
