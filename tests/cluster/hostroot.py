"""Runs this machine's own Python in pods: an almost empty image, into which the pod mounts the interpreter's folders.

So the tests need no image build and no registry, and test the source tree as it is. `HostRoot.overlay` is a pod overlay
as an LLMService's `spec.template` takes it; `add_to_pod` puts the same into any pod spec.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.images import Image, fill_root

SOURCE_TREE = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class HostRoot:
    """Which folders of this machine a pod sees, at the same paths, read-only."""

    host_root: Path  # where a node sees this machine's root folder
    folders: tuple[Path, ...]  # of this machine

    @classmethod
    def of_this_python(cls, host_root: Path, *more: Path) -> HostRoot:
        """Return what this interpreter, its packages and the source tree need, and `more` folders.

        A folder within another is left out.
        """
        interpreter = {Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent, Path("/usr")}
        wanted = sorted({*interpreter, Path(sys.prefix), SOURCE_TREE, *(path.resolve() for path in more)})
        outer: list[Path] = []
        for folder in wanted:  # sorted, so that the outer one comes first
            if not any(folder.is_relative_to(other) for other in outer):
                outer.append(folder)
        return cls(host_root, tuple(outer))

    def volumes(self) -> list[dict[str, Any]]:
        """Return the pod's volumes."""
        return [
            {"name": f"host-{number}", "hostPath": {"path": str(self.on_node(folder)), "type": "Directory"}}
            for number, folder in enumerate(self.folders)
        ]

    def mounts(self) -> list[dict[str, Any]]:
        """Return a container's mounts of the volumes."""
        return [
            {"name": f"host-{number}", "mountPath": str(folder), "readOnly": True}
            for number, folder in enumerate(self.folders)
        ]

    def add_to_pod(self, pod: dict[str, Any]) -> None:
        """Add volumes and mounts to a pod's `spec`, in every container."""
        pod.setdefault("volumes", []).extend(self.volumes())
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            container.setdefault("volumeMounts", []).extend(self.mounts())

    def on_node(self, folder: Path) -> Path:
        """Return where a node sees a folder of this machine."""
        return self.host_root / folder.relative_to("/")


def write_image(name: str, archive: Path, *, entrypoint: Sequence[str] = ()) -> Path:
    """Write an image whose programs all come from mounted folders, this environment's first; returns the archive."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "root")
        fill_root(root)
        for name_ in ("bin", "sbin", "lib", "lib64", "lib32"):
            link = Path("/", name_)
            if link.is_symlink():  # into /usr, which the pod mounts
                (root / name_).symlink_to(link.readlink())
        return Image(name, root, entrypoint=entrypoint, environment=_environment()).write(archive)


def _environment() -> Mapping[str, str]:
    programs = Path(sys.prefix) / "bin"
    return {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}
