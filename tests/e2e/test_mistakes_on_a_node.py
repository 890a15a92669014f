"""What a user who made a mistake sees on a real cluster, and that correcting it is enough."""

from __future__ import annotations

import pytest
from cluster.seam import Cluster
from e2e.installation import Images
from e2e.live_service import LiveService, eventually

pytestmark = pytest.mark.timeout(600)

MISSING = "hf://paceline-test/no-such-model"


def test_a_model_that_does_not_exist_is_said_at_the_first_failed_start_and_can_be_corrected(
    paceline: Cluster, images: Images, namespace: str
) -> None:
    """The reason is there once the server has given up, some 15 seconds on an otherwise idle machine."""
    service = LiveService.sample(paceline, namespace, images.spec)
    service.changed(model=MISSING).apply()

    eventually(lambda: service.condition("Ready").get("reason") == "ModelNotFound", 120)
    (pod,) = service.pods()
    assert pod["status"]["containerStatuses"][0]["restartCount"] <= 1
    assert MISSING in service.condition("Ready")["message"]
    assert "ModelNotFound" in service.kubectl("get", "llm", service.name)

    service.apply()
    service.wait("condition=Ready", 180)
