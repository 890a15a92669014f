"""The section `template` of an LLMService: what a user lays over the rendered pod. Used by `spec`.

The CRD lets any pod specification through, and what is wrong in it the API server says when the Deployment is applied.
Checked here is what merging needs, and what is too often got wrong to leave it to the API server's words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from pydantic import Field, field_validator

from paceline_operator import names
from paceline_operator.section import Section

_RESERVED_LABELS: Final = ("paceline.dev/", names.LABEL_APP, names.LABEL_MANAGED_BY)

MERGED_BY: Final[Mapping[str, str]] = MappingProxyType(
    {"containers": "name", "initContainers": "name", "ports": "containerPort"}
)
"""Lists of a pod whose items are merged by this key of theirs."""

REPLACED_BY: Final[Mapping[str, str]] = MappingProxyType(
    {"volumes": "name", "env": "name", "volumeMounts": "mountPath", "imagePullSecrets": "name"}
)
"""Lists of a pod whose items are replaced by their namesakes."""

_PORT_KEY: Final = "containerPort"  # the one key that is a number
_CONTAINERS: Final = ("containers", "initContainers")
_POD_LISTS: Final = (*_CONTAINERS, "volumes", "imagePullSecrets")
_CONTAINER_LISTS: Final = ("ports", "env", "volumeMounts")


class OverlayMetadata(Section):
    """Labels and annotations added to the pods."""

    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    @field_validator("labels", "annotations")
    @classmethod
    def _ours_stay_ours(cls, values: dict[str, str]) -> dict[str, str]:
        taken = [key for key in values if key.startswith(_RESERVED_LABELS)]
        if taken:
            raise ValueError(f"{', '.join(taken)}: set by the operator, choose other keys")
        return values


class TemplateSpec(Section):
    """An overlay merged into the rendered pod, as `desired.overlay` describes."""

    metadata: OverlayMetadata = Field(default_factory=OverlayMetadata)
    spec: dict[str, Any] = Field(default_factory=dict)

    @field_validator("spec")
    @classmethod
    def _lists_can_be_merged(cls, spec: dict[str, Any]) -> dict[str, Any]:
        mistakes = [*_list_mistakes(spec, _POD_LISTS, ""), *_container_mistakes(spec)]
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return spec


def _container_mistakes(spec: Mapping[str, Any]) -> Iterator[str]:
    for field in _CONTAINERS:
        for number, container in _mappings(spec.get(field)):
            path = f"{field}[{number}]."
            yield from _list_mistakes(container, _CONTAINER_LISTS, path)
            for place, variable in _mappings(container.get("env")):
                value = variable.get("value")
                if value is not None and not isinstance(value, str):
                    yield f"{path}env[{place}].value: {value!r} is no text; write it in quotes"


def _list_mistakes(owner: Mapping[str, Any], fields: tuple[str, ...], path: str) -> Iterator[str]:
    """Lists that are none, and items that have not the key by which they are told apart. `null` removes a list."""
    for field in fields:
        items, key = owner.get(field), MERGED_BY.get(field) or REPLACED_BY[field]
        if items is not None and not isinstance(items, list):
            yield f"{path}{field}: must be a list of items with `{key}`"
        elif field == "containers" and field in owner and items is None:
            yield f"{field}: the container {names.CONTAINER} cannot be removed"
        for number, item in enumerate(items if isinstance(items, list) else ()):
            if not isinstance(item, Mapping) or not isinstance(item.get(key), int if key == _PORT_KEY else str):
                yield f"{path}{field}[{number}]: {item!r} must be an item with `{key}`"


def _mappings(items: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The items of a list that are mappings, each with its place."""
    for number, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, Mapping):
            yield number, item
