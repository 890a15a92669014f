"""Where a model comes from, parsed once. Used by `spec` to validate and by `desired` to mount and to configure.

hf://ORG/NAME[@REVISION]   the hub, through the model store (looked up there first)
pvc://CLAIM[/PATH]         a folder in a PersistentVolumeClaim of the service's namespace
file:///PATH               a folder of the node (or of this machine, in local mode)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_HUB: Final = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
_CLAIM: Final = re.compile(r"pvc://(?P<claim>[a-z0-9]([-a-z0-9.]*[a-z0-9])?)(/(?P<path>.*))?")
_FOLDER: Final = re.compile(r"file://(?P<path>/.+)")
_UNSUPPORTED: Final = ("s3://", "oci://")


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository of the Hugging Face hub."""

    repository: str  # ORG/NAME
    revision: str | None


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder in a PersistentVolumeClaim."""

    claim: str
    path: str  # inside the volume, without a leading slash; "" is its root


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the node."""

    path: str  # absolute


ModelUri = Hub | Claim | Folder


def parse_model_uri(uri: str) -> ModelUri:
    """Parse a model URI. Raises ValueError with what to write instead."""
    if match := _HUB.fullmatch(uri):
        return Hub(match["repository"], match["revision"])
    if match := _CLAIM.fullmatch(uri):
        return Claim(match["claim"], _inside(match["path"] or ""))
    if match := _FOLDER.fullmatch(uri):
        return Folder(f"/{_inside(match['path'])}")
    if uri.startswith(_UNSUPPORTED):
        scheme = uri.split("://", 1)[0]
        raise ValueError(f"{scheme}:// is not supported; use hf://ORG/NAME, pvc://CLAIM/PATH or file:///PATH")
    raise ValueError(f"{uri!r} is not a model URI; write hf://ORG/NAME, pvc://CLAIM/PATH or file:///PATH")


def _inside(path: str) -> str:
    """Normalise a path without letting it climb: `..` would leave the volume that was mounted for it."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError("the path of a model must not contain '..'")
    return "/".join(parts)
