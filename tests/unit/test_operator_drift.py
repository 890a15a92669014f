"""When a child has to be applied again."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from paceline_operator.cluster import Manifest
from paceline_operator.desired import render
from paceline_operator.drift import differs
from paceline_operator.spec import parse_service
from paceline_operator.testing import llmservice

RESOURCES = {"limits": {"cpu": "1500m", "memory": "0.5Gi"}}


def deployment(**spec: Any) -> Manifest:
    """A rendered Deployment."""
    return render(parse_service(llmservice(resources=RESOURCES, **spec)), "image").deployment


def stored() -> Manifest:
    """The Deployment as an API server stores and returns it: with defaults, status and quantities in its own form."""
    live = copy.deepcopy(deployment())
    live["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": []}
    live["spec"]["template"]["spec"] |= {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst"}
    server = live["spec"]["template"]["spec"]["containers"][0]
    server["resources"]["limits"] = {"cpu": "1.5", "memory": "512Mi"}
    live["status"] = {"readyReplicas": 1}
    return live


def test_what_the_api_server_adds_is_no_difference() -> None:
    """Defaults, status and another spelling of a quantity."""
    assert not differs(stored(), deployment())


def test_a_changed_intention_is_a_difference() -> None:
    """Even one that only takes a field away, which no comparison of values would see."""
    assert differs(stored(), deployment(drainSeconds=5))
    live = stored()
    live["spec"]["template"]["spec"]["hostNetwork"] = True
    live["metadata"]["annotations"]["paceline.dev/applied"] = "before"
    assert differs(live, deployment())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), 5),
        (("metadata", "labels", "paceline.dev/service"), "other"),
        (("spec", "template", "spec", "containers", 0, "image"), "evil"),
        (("spec", "template", "spec", "containers", 0, "resources", "limits", "cpu"), "2"),
        (("spec", "template", "spec", "volumes"), []),
    ],
)
def test_a_field_of_ours_that_somebody_changed_is_a_difference(path: tuple[str | int, ...], value: object) -> None:
    """It is set back."""
    live = stored()
    *parents, last = path
    target: Any = live
    for part in parents:
        target = target[part]
    target[last] = value
    assert differs(live, deployment())


def test_fields_of_others_are_theirs() -> None:
    """An annotation or a second owner is left alone."""
    live = stored()
    live["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] = "now"
    live["metadata"]["ownerReferences"].append({"kind": "Other", "uid": "x"})
    assert not differs(live, deployment())
