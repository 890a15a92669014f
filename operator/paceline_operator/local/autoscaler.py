"""The HorizontalPodAutoscaler controller of local mode, as a pure function of metrics, history and time.

It follows Kubernetes' controller (pkg/controller/podautoscaler) for what the operator renders: Object metrics with
targets AverageValue and Value, the tolerance of 10 %, the largest proposal of all metrics, stabilisation windows and
policies. A metric is never missing here: the adapter's collector holds the pressure where a pod does not answer.
Called by `plane` every few seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_operator.cluster import Manifest
from paceline_operator.quantity import parse_quantity

_TOLERANCE = 0.1  # Kubernetes' --horizontal-pod-autoscaler-tolerance


@dataclass(frozen=True, slots=True)
class Scale:
    """Pods at the moment: as the scale subresource says, and how many of them are ready."""

    replicas: int
    ready: int


@dataclass(frozen=True, slots=True)
class Moment:
    """One look of the past: when, what was proposed, and by how much the replicas changed then."""

    at: float
    proposed: int
    change: int


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas there should be, what the metrics alone proposed, and the HPA's status."""

    replicas: int
    proposed: int
    conditions: tuple[Manifest, ...]


def decide(hpa: Manifest, scale: Scale, metrics: Mapping[str, float], past: Sequence[Moment], now: float) -> Decision:
    """Decide the number of replicas.

    Args:
        hpa: the object; its spec is as the operator renders it.
        scale: the pods now.
        metrics: values by name.
        past: looks as old as the longest window at least, in any order.
        now: seconds of the clock that `past` was taken with.
    """
    spec = hpa["spec"]
    if scale.replicas == 0:
        return Decision(0, 0, (_ABLE, _condition("ScalingActive", False, "ScalingDisabled", _AT_ZERO)))
    proposals = {
        metric["object"]["metric"]["name"]: _propose(metric["object"], scale, metrics) for metric in spec["metrics"]
    }
    proposed = max(proposals.values())
    low, high = spec.get("minReplicas", 1), spec["maxReplicas"]
    settled = _stabilise(proposed, spec["behavior"], scale.replicas, past, now)
    replicas = max(low, min(high, _limit(settled, spec["behavior"], scale.replicas, past, now)))
    used = max(proposals, key=lambda name: proposals[name])
    active = _condition("ScalingActive", True, "ValidMetricFound", f"the HPA could calculate replicas from {used}")
    limited = _condition("ScalingLimited", replicas != settled, *_limit_reason(settled, replicas))
    return Decision(replicas, proposed, (_ABLE, active, limited))


def _condition(kind: str, holds: bool, reason: str, message: str) -> Manifest:
    return {"type": kind, "status": "True" if holds else "False", "reason": reason, "message": message}


_ABLE = _condition("AbleToScale", True, "ReadyForNewScale", "recommended size matches current size")


_AT_ZERO = "scaling is disabled since the replica count of the target is zero"


def _limit_reason(settled: int, replicas: int) -> tuple[str, str]:
    if replicas < settled:
        return "TooManyReplicas", "the desired replica count is more than maxReplicas or the scale-up policies allow"
    if replicas > settled:
        return "TooFewReplicas", "the desired replica count is less than minReplicas or the scale-down policies allow"
    return "DesiredWithinRange", "the desired count is within the acceptable range"


def _propose(metric: Mapping[str, Any], scale: Scale, metrics: Mapping[str, float]) -> int:
    """Replicas by one metric alone."""
    value = metrics[metric["metric"]["name"]]
    target = metric["target"]
    if target["type"] == "AverageValue":
        per_pod = float(parse_quantity(target["averageValue"]))
        ratio = value / (per_pod * scale.replicas)
        return scale.replicas if _tolerable(ratio) else math.ceil(value / per_pod)
    ratio = value / float(parse_quantity(target["value"]))
    return scale.replicas if _tolerable(ratio) else math.ceil(ratio * scale.ready)


def _tolerable(ratio: float) -> bool:
    return abs(1.0 - ratio) <= _TOLERANCE


def _stabilise(proposed: int, behavior: Manifest, current: int, past: Sequence[Moment], now: float) -> int:
    """Up only as far as every proposal of the up window says, down only as far as every one of the down window."""

    def within(direction: str) -> list[int]:
        start = now - behavior[direction]["stabilizationWindowSeconds"]
        return [proposed, *(moment.proposed for moment in past if moment.at > start)]

    lowest_of_up, highest_of_down = min(within("scaleUp")), max(within("scaleDown"))
    return min(max(current, lowest_of_up), highest_of_down)


def _limit(settled: int, behavior: Manifest, current: int, past: Sequence[Moment], now: float) -> int:
    """The policies: how far from the number at the start of each policy's period one may be by now."""
    if settled > current:
        rules = behavior["scaleUp"]
        most = _by_policies(rules, current, past, now, _raise, widest=max)
        return min(settled, max(most, current))
    if settled < current:
        rules = behavior["scaleDown"]
        least = _by_policies(rules, current, past, now, _lower, widest=min)
        return max(settled, min(least, current))
    return settled


def _by_policies(
    rules: Manifest,
    current: int,
    past: Sequence[Moment],
    now: float,
    bound: Callable[[int, Manifest], int],
    widest: Callable[[Sequence[int]], int],
) -> int:
    bounds = []
    for policy in rules["policies"]:
        recent = sum(moment.change for moment in past if moment.at > now - policy["periodSeconds"])
        bounds.append(bound(current - recent, policy))
    return widest(bounds)


def _raise(start: int, policy: Manifest) -> int:
    value: int = policy["value"]
    return start + value if policy["type"] == "Pods" else math.ceil(start * (1 + value / 100))


def _lower(start: int, policy: Manifest) -> int:
    value: int = policy["value"]
    return start - value if policy["type"] == "Pods" else int(start * (1 - value / 100))
