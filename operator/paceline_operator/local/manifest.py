"""The user's file: read and checked whole before anything starts. Called by `paceline up`.

A cluster checks an LLMService when it is applied, and says later, in conditions, what the pods cannot do. Here
everything that can be known from the file is said at once, each mistake with its path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from paceline_operator import names
from paceline_operator.cluster import Key, Manifest
from paceline_operator.desired import render
from paceline_operator.errors import InvalidSpec
from paceline_operator.local import container
from paceline_operator.local import secrets as secrets_
from paceline_operator.local.errors import InvalidManifest
from paceline_operator.model_uri import Claim
from paceline_operator.spec import LLMService, LLMServiceSpec, parse_spec

IMAGE = "localhost/paceline-server"
"""Stands in the pods' image field; a process has no image."""
_FIELDS = {"apiVersion", "kind", "metadata", "spec", "status"}
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")  # RFC 1123
_KEPT_METADATA = ("name", "labels", "annotations")


def load(path: Path, *, cpu: bool = False, secrets: Path | None = None) -> Manifest:
    """The LLMService of a file, ready for a store.

    Args:
        path: a YAML or JSON file with one LLMService.
        cpu: ask for no NVIDIA devices, whatever the file says.
        secrets: the folder of the user's secrets.

    Raises:
        InvalidManifest: with every mistake.
    """
    document = _one_document(path)
    mistakes = _envelope_mistakes(document)
    spec = document.get("spec")
    if not isinstance(spec, dict):
        raise InvalidManifest(str(path), [*mistakes, "spec: required"])
    if cpu:
        spec = {**spec, "resources": _without_devices(spec.get("resources"))}
    try:
        parsed = parse_spec(spec)
        mistakes += [*_unsupported(parsed), *secrets_.mistakes(parsed, secrets)]
    except InvalidSpec as error:
        mistakes += [str(field) for field in error.errors]
    if mistakes:
        raise InvalidManifest(str(path), mistakes)
    metadata = {key: value for key, value in document["metadata"].items() if key in _KEPT_METADATA}
    metadata["namespace"] = document["metadata"].get("namespace", "default")
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": metadata,
        "spec": {"replicas": 1, **spec},
    }


def notes(service: Manifest) -> list[str]:
    """What the file asks for that has a meaning in a cluster only, in words for the user."""
    spec = service["spec"]
    found = []
    if spec.get("image"):
        found.append(f"spec.image: not used, this machine's {container.SERVER} runs")
    if (spec.get("resources") or {}).get("limits", {}).keys() & {"cpu", "memory"}:
        found.append("spec.resources.limits: cpu and memory are not limited on this machine")
    engine = spec.get("engine") or {}
    found += [
        f"spec.engine.{field}: {engine[field]} of this machine, where it stays; in a cluster it is the pod's"
        for field in ("diskPath", "tracePath")
        if engine.get(field)
    ]
    overlay = spec.get("template", {}).get("spec", {})
    ignored = sorted(set(overlay) & container.POD_WITHOUT_MEANING)
    return found + [f"spec.template.spec.{field}: has no meaning on one machine" for field in ignored]


def _one_document(path: Path) -> dict[str, Any]:
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidManifest(str(path), [f"cannot read the file: {reason}"]) from None
    except yaml.YAMLError as error:
        raise InvalidManifest(str(path), [f"not valid YAML: {' '.join(str(error).split())}"]) from None
    kinds = [document.get("kind") if isinstance(document, dict) else None for document in documents]
    if kinds != [names.KIND]:
        found = ", ".join(str(kind or "something without a kind") for kind in kinds) or "nothing"
        raise InvalidManifest(str(path), [f"one {names.KIND} is expected in the file, it has {found}{_advice(kinds)}"])
    document: dict[str, Any] = documents[0]
    return document


def _advice(kinds: list[object]) -> str:
    match kinds.count(names.KIND):
        case 0:
            return ""
        case 1:
            return f"; give it a file with that {names.KIND} alone"
        case _:
            return "; write each into a file of its own, and run `paceline up` for each"


def _envelope_mistakes(document: dict[str, Any]) -> list[str]:
    """What the API server checks around the specification."""
    mistakes = [f"{field}: unknown field" for field in document if field not in _FIELDS]
    if document.get("apiVersion") != names.API_VERSION:
        mistakes.append(f"apiVersion: must be {names.API_VERSION}, not {document.get('apiVersion')!r}")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        return [*mistakes, "metadata: required"]
    if "name" not in metadata:
        mistakes.append("metadata.name: required")
    for field in ("name", "namespace"):
        value = metadata.get(field, "default")
        if not isinstance(value, str) or len(value) > 253 or not _SUBDOMAIN.fullmatch(value):
            mistakes.append(
                f"metadata.{field}: {value!r} must be lower case letters, digits, '-' and '.', at most 253, "
                "beginning and ending with a letter or digit"
            )
    return mistakes


def _without_devices(resources: Any) -> Any:
    """The resources without NVIDIA devices. What is no mapping is left to the check of the specification."""
    if resources is None:
        return {}
    if not isinstance(resources, dict):
        return resources
    return {
        section: {name: amount for name, amount in amounts.items() if not name.startswith(names.GPU_RESOURCE_PREFIX)}
        if isinstance(amounts, dict)
        else amounts
        for section, amounts in resources.items()
    }


def _unsupported(spec: LLMServiceSpec) -> list[str]:
    """What a cluster would do and local mode does not."""
    mistakes = []
    if isinstance(spec.model_uri, Claim):
        mistakes.append("spec.model: pvc:// is a volume of a cluster; on this machine write file:///PATH")
    if spec.handover is not None:
        mistakes.append("spec.handover: replicas find each other by an address of a cluster; leave it out here")
    if not mistakes:
        template = render(LLMService(Key("default", "check"), "", 0, spec), IMAGE).deployment["spec"]["template"]
        mistakes += [f"spec.template.spec: {mistake}" for mistake in container.check(template)]
    return mistakes
