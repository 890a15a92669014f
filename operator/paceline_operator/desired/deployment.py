"""The Deployment: how many pods, and how old ones give way to new ones."""

from __future__ import annotations

from typing import Any, Final

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.desired.metadata import child
from paceline_operator.desired.pod import revision_of
from paceline_operator.spec import LLMService

# Beyond the start-up budget: time to be scheduled and to pull the image before a rollout counts as stuck.
_PROGRESS_MARGIN_SECONDS: Final = 600


def render_deployment(service: LLMService, template: Manifest, image: str) -> Manifest:
    """The Deployment of `template`; replicas are copied from the service, where a user or the HPA wrote them."""
    revision = revision_of(template)
    labels = {**template["metadata"]["labels"], names.LABEL_REVISION: revision}
    return child(
        service,
        "apps/v1",
        "Deployment",
        {
            "spec": {
                "replicas": service.spec.replicas,
                "selector": {"matchLabels": names.selector_labels(service.name)},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(service)},
                "progressDeadlineSeconds": service.spec.startup_seconds + _PROGRESS_MARGIN_SECONDS,
                "revisionHistoryLimit": 3,
                "template": {**template, "metadata": {**template["metadata"], "labels": labels}},
            },
        },
        annotations={} if service.spec.image else {names.ANNOTATION_SERVER_IMAGE: image},
    )


def _rolling_update(service: LLMService) -> dict[str, Any]:
    """In place where a pod holds a device that its successor would wait for, else a new pod first."""
    in_place = service.spec.uses_accelerator
    return {"maxSurge": 0 if in_place else 1, "maxUnavailable": 1 if in_place else 0}
