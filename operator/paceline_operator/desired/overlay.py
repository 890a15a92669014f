"""Merging the user's `spec.template` into the rendered pod, after the rules of Kubernetes' strategic merge patch.

Mappings merge key by key and `null` removes a key. These lists merge by the key that identifies their items; all
others are replaced. Volumes, variables and mounts are replaced item by item, since two sources in one volume are never
meant.
Source of the merge keys: the `patchMergeKey` tags of Kubernetes' core/v1 PodSpec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_operator.cluster import Manifest
from paceline_operator.template import MERGED_BY, REPLACED_BY, TemplateSpec


def merge_pod(template: Manifest, overlay: TemplateSpec) -> Manifest:
    """The template with the overlay merged in. Neither argument is changed."""
    metadata = {"labels": overlay.metadata.labels, "annotations": overlay.metadata.annotations}
    merged: Manifest = _merge(template, {"metadata": metadata, "spec": overlay.spec})
    return merged


def _merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in overlay.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge_value(key, result.get(key), value)
    return result


def _merge_value(key: str, base: Any, overlay: Any) -> Any:
    if isinstance(overlay, Mapping):
        return _merge(base if isinstance(base, Mapping) else {}, overlay)
    if isinstance(base, list) and isinstance(overlay, list):
        if identity := MERGED_BY.get(key):
            return _merge_items(base, overlay, identity, deep=True)
        if identity := REPLACED_BY.get(key):
            return _merge_items(base, overlay, identity, deep=False)
    return overlay


def _merge_items(base: list[Any], overlay: list[Any], identity: str, *, deep: bool) -> list[Any]:
    """Items of `base` in their order, changed or replaced by their namesakes in `overlay`, then the new ones."""
    items = {item[identity]: item for item in base}
    for item in overlay:
        known = items.get(item[identity])
        items[item[identity]] = _merge(known, item) if deep and known else item
    return list(items.values())
