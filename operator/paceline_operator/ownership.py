"""Which object is which, whose it is, and whether it stays. Pure; used wherever objects are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_operator import names
from paceline_operator.cluster import Manifest


def identity(manifest: Manifest) -> tuple[str, str]:
    """Kind and name: what tells the objects of one namespace apart."""
    return manifest["kind"], manifest["metadata"]["name"]


def is_alive(manifest: Manifest) -> bool:
    """Whether nobody has deleted it."""
    return not manifest["metadata"].get("deletionTimestamp")


def controller(manifest: Mapping[str, Any]) -> Manifest:
    """The owner that controls it, of which there is one at most; empty where nothing does."""
    owners = manifest["metadata"].get("ownerReferences", ())
    return next((owner for owner in owners if owner.get("controller")), {})


def is_ours(child: Manifest, uid: str) -> bool:
    """Whether the LLMService of this uid controls it."""
    return controller(child).get("uid") == uid


def is_of_namesake(child: Manifest, name: str) -> bool:
    """Whether an LLMService of this name controls it. If that is another one by now, it is garbage on its way out."""
    owner = controller(child)
    return (owner.get("apiVersion"), owner.get("kind"), owner.get("name")) == (names.API_VERSION, names.KIND, name)
