"""The HorizontalPodAutoscaler on the LLMService's own /scale, fed by the metrics adapter."""

from __future__ import annotations

from typing import Any, Final

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.desired.metadata import child
from paceline_operator.spec import AutoscalingSpec, LLMService

# Up: double or four more, whichever is larger, every quarter of a minute (Kubernetes' own default, which we pin).
# Down: half a minute's worth at most by half, since each pod that goes takes its prefix cache with it.
_SCALE_UP_POLICIES: Final = (
    {"type": "Percent", "value": 100, "periodSeconds": 15},
    {"type": "Pods", "value": 4, "periodSeconds": 15},
)
_SCALE_DOWN_POLICIES: Final = ({"type": "Percent", "value": 50, "periodSeconds": 30},)


def render_hpa(service: LLMService) -> Manifest | None:
    """The HPA, or None while `spec.autoscaling` is absent."""
    autoscaling = service.spec.autoscaling
    if autoscaling is None:
        return None
    target = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": service.name}
    return child(
        service,
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        {
            "spec": {
                "scaleTargetRef": target,
                "minReplicas": autoscaling.min_replicas,
                "maxReplicas": autoscaling.max_replicas,
                "metrics": [
                    _object_metric(
                        names.METRIC_QUEUE_DEPTH,
                        target,
                        {"type": "AverageValue", "averageValue": str(autoscaling.target_queue_depth)},
                    ),
                    _object_metric(names.METRIC_TTFT_PRESSURE, target, {"type": "Value", "value": "1"}),
                ],
                "behavior": _behavior(autoscaling),
            }
        },
    )


def _object_metric(name: str, described: dict[str, str], target: dict[str, str]) -> dict[str, Any]:
    return {"type": "Object", "object": {"metric": {"name": name}, "describedObject": described, "target": target}}


def _behavior(autoscaling: AutoscalingSpec) -> dict[str, Any]:
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": autoscaling.scale_up_stabilization_seconds,
            "selectPolicy": "Max",
            "policies": list(_SCALE_UP_POLICIES),
        },
        "scaleDown": {
            "stabilizationWindowSeconds": autoscaling.scale_down_stabilization_seconds,
            "selectPolicy": "Max",
            "policies": list(_SCALE_DOWN_POLICIES),
        },
    }
