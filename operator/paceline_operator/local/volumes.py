"""A pod's volumes as folders of this machine, and what its paths mean then.

A process sees the whole machine, not a container's file system, so a mount is a rewriting of paths: what the pod calls
/etc/paceline is a folder in the pod's own state. `mount` is called by the kubelet before each start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.local import secrets as secrets_
from paceline_operator.local.errors import CannotStart, NotSupportedLocally

FAILED_MOUNT = "FailedMount"
"""The kubelet's reason for a volume that is not there; it is told in an event, the container stays in creation."""
_KINDS = ("configMap", "emptyDir", "hostPath", "projected")
_MOUNT_FIELDS = {"name", "mountPath", "readOnly"}


@dataclass(frozen=True, slots=True)
class Mounts:
    """Where the paths of a container lie on this machine."""

    folders: Mapping[str, Path]  # mount path → folder

    def translate(self, text: str) -> str:
        """A path of the container (also as file:// URI) as a path of this machine; any other text as it is."""
        prefix, path = ("file://", text.removeprefix("file://")) if text.startswith("file://") else ("", text)
        for mount_path in sorted(self.folders, key=len, reverse=True):
            if path == mount_path or path.startswith(f"{mount_path}/"):
                return f"{prefix}{self.folders[mount_path]}{path[len(mount_path) :]}"
        return text


def check(pod_spec: Manifest) -> list[str]:
    """Everything about the volumes of a pod that local mode does not do, in words."""
    mistakes = [
        f"volume {volume['name']} is of kind {kind}: local mode knows {', '.join(_KINDS)}"
        for volume in pod_spec.get("volumes", ())
        for kind in volume
        if kind not in ("name", *_KINDS)
    ]
    mistakes += [
        f"volume {volume['name']} projects more than keys of Secrets: local mode knows secret with name and items"
        for volume in pod_spec.get("volumes", ())
        for source in volume.get("projected", {}).get("sources", ())
        if set(source) != {"secret"} or set(source["secret"]) != {"name", "items"}
    ]
    known = {volume["name"] for volume in pod_spec.get("volumes", ())}
    for mount in pod_spec["containers"][0].get("volumeMounts", ()):
        if mount["name"] not in known:
            mistakes.append(f"mount {mount['mountPath']} is of volume {mount['name']}, which the pod does not have")
        unknown = (field for field in mount if field not in _MOUNT_FIELDS)
        mistakes += [f"mount {mount['mountPath']} has {field}: local mode mounts whole volumes" for field in unknown]
    return mistakes


def mount(
    pod: Manifest,
    folder: Path,
    model_store: Path,
    find: Callable[[str, str], Manifest | None],
    secrets: Path | None = None,
) -> Mounts:
    """Make the pod's volumes.

    Args:
        pod: has been checked.
        folder: of the pod; its volumes are made below it.
        model_store: stands for the volume at which the pod keeps its models.
        find: an object by kind and name.
        secrets: the user's folder of secrets.

    Raises:
        CannotStart: a volume's source does not exist.
    """
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
    folders = {}
    for mounted in pod["spec"]["containers"][0].get("volumeMounts", ()):
        path, volume = mounted["mountPath"].rstrip("/"), volumes[mounted["name"]]
        if path == names.MODEL_STORE and "emptyDir" in volume:
            folders[path] = model_store
        else:
            folders[path] = _make(volume, folder / volume["name"], find, secrets)
    return Mounts(folders)


def _make(volume: Manifest, folder: Path, find: Callable[[str, str], Manifest | None], secrets: Path | None) -> Path:
    match volume:
        case {"hostPath": {"path": path}}:
            if not Path(path).exists():
                raise CannotStart(FAILED_MOUNT, f'volume "{volume["name"]}": {path} does not exist on this machine')
            return Path(path)
        case {"emptyDir": _}:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        case {"configMap": {"name": name}}:
            config_map = find("ConfigMap", name)
            if config_map is None:
                raise CannotStart(FAILED_MOUNT, f'volume "{volume["name"]}": configmap "{name}" not found')
            folder.mkdir(parents=True, exist_ok=True)
            for key, text in config_map["data"].items():
                (folder / key).write_text(text, encoding="utf-8")
            return folder
        case {"projected": {"sources": sources}}:
            for source in sources:
                _project(source["secret"], volume["name"], folder, secrets)
            return folder
    raise NotSupportedLocally(f"volume {volume['name']} is of no kind that local mode knows")


def _project(secret: Manifest, volume: str, folder: Path, secrets: Path | None) -> None:
    for item in secret["items"]:
        if not secrets_.link(secrets, secret["name"], item["key"], folder / item["path"]):
            raise CannotStart(
                FAILED_MOUNT, f'volume "{volume}": references non-existent secret key: {secret["name"]}/{item["key"]}'
            )
