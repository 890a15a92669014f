"""From a service to the objects that serve it: pure functions, no I/O, no clock, same input same output.

`render` is the whole of it. The operator applies the result to an API server; `local` runs the same pod as a process.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_operator.cluster import Manifest
from paceline_operator.desired.config import render_config_map
from paceline_operator.desired.deployment import render_deployment
from paceline_operator.desired.disruption import render_disruption_budget
from paceline_operator.desired.hpa import render_hpa
from paceline_operator.desired.pod import render_pod_template, revision_of
from paceline_operator.desired.service import render_service
from paceline_operator.spec import LLMService


@dataclass(frozen=True, slots=True)
class Desired:
    """What should exist for one service."""

    revision: str  # hash of the pod template: equal revisions, equal pods
    image: str  # the server image that this revision runs
    config_map: Manifest
    service: Manifest
    deployment: Manifest
    disruption_budget: Manifest
    hpa: Manifest | None  # None: autoscaling is off and an HPA of ours has to go

    @property
    def children(self) -> tuple[Manifest, ...]:
        """Children in the order of creation: what a pod needs exists before the pod."""
        optional = (self.hpa,) if self.hpa else ()
        return (self.config_map, self.service, self.deployment, self.disruption_budget, *optional)


def render(service: LLMService, image: str) -> Desired:
    """Render all children of `service`, its pods running `image`."""
    config_map = render_config_map(service)
    template = render_pod_template(service, image)
    return Desired(
        revision=revision_of(template),
        image=image,
        config_map=config_map,
        service=render_service(service),
        deployment=render_deployment(service, template, image),
        disruption_budget=render_disruption_budget(service),
        hpa=render_hpa(service),
    )
