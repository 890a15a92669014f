"""The PodDisruptionBudget: a cluster that empties nodes takes a service's pods one after the other."""

from __future__ import annotations

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.desired.metadata import child
from paceline_operator.spec import LLMService


def render_disruption_budget(service: LLMService) -> Manifest:
    """One pod at a time; never none, since the budget of a single replica would stop the node's upgrade for ever.

    A pod that is not ready may always be evicted: it serves nobody, and may wait for what only another node has.
    """
    return child(
        service,
        "policy/v1",
        "PodDisruptionBudget",
        {
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": names.selector_labels(service.name)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            }
        },
    )
