"""The Service in front of the pods: only ready ones get requests."""

from __future__ import annotations

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.desired.metadata import child
from paceline_operator.spec import LLMService


def render_service(service: LLMService) -> Manifest:
    """The Service, port 8000, named `http`."""
    port = {"name": names.PORT_NAME, "port": names.PORT, "targetPort": names.PORT_NAME, "protocol": "TCP"}
    return child(
        service,
        "v1",
        "Service",
        {"spec": {"type": "ClusterIP", "selector": names.selector_labels(service.name), "ports": [port]}},
    )
