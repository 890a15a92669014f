"""Metadata that all children share: name, namespace, labels, the owner, and the hash of what we mean."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.spec import LLMService


def child(
    service: LLMService,
    api_version: str,
    kind: str,
    body: dict[str, Any],
    *,
    name: str | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """A complete child manifest; `body` is everything but metadata. `name` is the service's own when it is left out."""
    manifest: Manifest = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name or names.child_name(service.name),
            "namespace": service.namespace,
            "labels": names.common_labels(service.name),
            "annotations": dict(annotations or {}),
            "ownerReferences": [names.owner_reference(service.name, service.uid)],
        },
        **body,
    }
    manifest["metadata"]["annotations"][names.ANNOTATION_APPLIED] = digest(manifest)
    return manifest


def digest(value: Any) -> str:
    """Short stable hash of a JSON value, fit for labels and annotations."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]
