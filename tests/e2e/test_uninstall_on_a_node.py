"""What is left when the product goes: the definition of the users' objects, and nothing that gets stuck."""

from __future__ import annotations

import pytest
from cluster.seam import Cluster
from e2e.installation import CRD, CRD_API, Images, install, system_namespace, uninstall
from e2e.live_service import LiveService, eventually, everything, settled

pytestmark = pytest.mark.timeout(600)


def test_helm_uninstall_leaves_the_crd_and_nothing_else(node_cluster: Cluster, images: Images, namespace: str) -> None:
    """An LLMService that outlives the operator can still be deleted; then the chart installs again."""
    kubectl = node_cluster.kubectl
    with system_namespace(node_cluster):
        before = everything(node_cluster)
        install(node_cluster, images)
        orphan = LiveService.sample(node_cluster, namespace, images.spec, {"replicas": 0})
        orphan.apply()
        eventually(lambda: kubectl.exists(f"deployment/{orphan.name}", "-n", namespace), 30)

        uninstall(node_cluster)
        kubectl("delete", f"llm/{orphan.name}", "-n", namespace, "--timeout=30s")
        kept = {f"CustomResourceDefinition /{CRD}", f"APIService /{CRD_API}"}
        assert settled(lambda: everything(node_cluster) - before, kept, 60) == kept
        install(node_cluster, images)
