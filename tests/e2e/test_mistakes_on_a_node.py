"""What a user who made a mistake sees on a real cluster, and that correcting it is enough."""

from __future__ import annotations

import pytest
from cluster.seam import Cluster
from e2e.installation import Images
from e2e.live_service import LiveService, eventually

pytestmark = pytest.mark.timeout(600)


def test_a_model_that_does_not_exist_is_said_within_30_seconds_and_can_be_corrected(
    paceline: Cluster, images: Images, namespace: str
) -> None:
    good = LiveService.sample(paceline, namespace, images.spec)
    good.changed(model="hf://paceline-test/no-such-model").apply()

    def reported() -> bool:
        ready = good.condition("Ready")
        return ready.get("reason") == "ModelNotFound" and "hf://paceline-test/no-such-model" in ready["message"]

    eventually(reported, 30)
    assert "ModelNotFound" in good.kubectl("get", "llm", good.name)
    good.apply()
    good.wait("condition=Ready", 180)
