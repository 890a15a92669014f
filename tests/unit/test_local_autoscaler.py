"""The local autoscaler decides as Kubernetes' HPA controller does on the HPA that the operator renders."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_operator.cluster import Key, Manifest
from paceline_operator.desired.hpa import render_hpa
from paceline_operator.local.autoscaler import Decision, Moment, Scale, decide
from paceline_operator.spec import LLMService, parse_spec


def make_hpa(**autoscaling: Any) -> Manifest:
    settings = {"minReplicas": 1, "maxReplicas": 8, "targetQueueDepth": 4, **autoscaling}
    spec = parse_spec({"model": "hf://a/b", "autoscaling": settings})
    hpa = render_hpa(LLMService(Key("default", "x"), "uid", 1, spec))
    assert hpa is not None
    return hpa


def run(
    replicas: int, queue: float, pressure: float = 0.0, past: tuple[Moment, ...] = (), **autoscaling: Any
) -> Decision:
    metrics = {"queue_depth": queue, "ttft_pressure": pressure}
    return decide(make_hpa(**autoscaling), Scale(replicas, ready=replicas), metrics, past, now=1000.0)


@pytest.mark.parametrize(
    ("replicas", "queue", "pressure", "expected"),
    [
        (1, 8, 0.0, 2),  # 8 requests, 4 per replica
        (1, 4.3, 0.0, 1),  # within the tolerance of 10 %
        (1, 5, 0.0, 2),
        (2, 3, 1.5, 3),  # the larger proposal wins
        (2, 8, 1.05, 2),  # pressure within the tolerance
        (4, 100, 0.0, 8),  # maxReplicas
    ],
)
def test_replicas_follow_the_larger_of_both_metrics(
    replicas: int, queue: float, pressure: float, expected: int
) -> None:
    assert run(replicas, queue, pressure).replicas == expected


def test_one_step_up_at_most_doubles_or_adds_four() -> None:
    assert run(1, 400, maxReplicas=100).replicas == 5
    assert run(10, 400, maxReplicas=100).replicas == 20


def test_pods_added_within_the_policy_period_count_against_the_next_step() -> None:
    just_added = (Moment(at=990.0, proposed=5, change=4),)
    assert run(5, 400, past=just_added, maxReplicas=100).replicas == 5
    long_ago = (Moment(at=900.0, proposed=5, change=4),)
    assert run(5, 400, past=long_ago, maxReplicas=100).replicas == 10


def test_replicas_go_down_only_when_the_whole_window_says_so() -> None:
    busy = (Moment(at=900.0, proposed=2, change=0),)
    assert run(2, 0, past=busy, scaleDownStabilizationSeconds=300).replicas == 2
    assert run(2, 0, past=busy, scaleDownStabilizationSeconds=60).replicas == 1


def test_one_step_down_takes_half_at_most_and_keeps_the_minimum() -> None:
    assert run(8, 0, scaleDownStabilizationSeconds=0).replicas == 4
    assert run(2, 0, scaleDownStabilizationSeconds=0, minReplicas=2).replicas == 2


def test_zero_replicas_switch_scaling_off_and_the_condition_says_so() -> None:
    decision = run(0, 100)
    assert decision.replicas == 0
    assert {condition["type"]: condition["reason"] for condition in decision.conditions}[
        "ScalingActive"
    ] == "ScalingDisabled"


def test_a_working_autoscaler_reports_the_metric_it_followed() -> None:
    active = run(1, 8).conditions[1]
    assert (active["type"], active["status"], active["reason"]) == ("ScalingActive", "True", "ValidMetricFound")
    assert "queue_depth" in active["message"]
