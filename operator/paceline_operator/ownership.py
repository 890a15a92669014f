"""Which object is which, whose it is, and whether it stays. Pure; used by `reconcile` and `leftovers`."""

from __future__ import annotations

from paceline_operator import names
from paceline_operator.cluster import Manifest


def identity(manifest: Manifest) -> tuple[str, str]:
    """Kind and name: what tells the objects of one namespace apart."""
    return manifest["kind"], manifest["metadata"]["name"]


def is_alive(manifest: Manifest) -> bool:
    """Whether nobody has deleted it."""
    return not manifest["metadata"].get("deletionTimestamp")


def is_ours(child: Manifest, uid: str) -> bool:
    """Whether the LLMService of this uid controls it."""
    owners = child["metadata"].get("ownerReferences", ())
    return any(owner.get("controller") and owner["uid"] == uid for owner in owners)


def is_of_namesake(child: Manifest, name: str) -> bool:
    """Whether an LLMService of this name controls it. If that is another one by now, it is garbage on its way out."""
    owners = child["metadata"].get("ownerReferences", ())
    ours = (names.API_VERSION, names.KIND, name)
    return any(
        owner.get("controller") and (owner["apiVersion"], owner["kind"], owner["name"]) == ours for owner in owners
    )
