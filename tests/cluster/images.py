"""Container images made from folders, without a registry: OCI archives that `ctr` and `kind load` import.

Images are named under `paceline.test/`, for a name without a host would be taken for Docker Hub's. Used by `node`,
`kind` and the end-to-end tests; pods that use them say `imagePullPolicy: Never`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAUSE = "paceline.test/pause:1"
IMPORT_SECONDS = 600  # the server's image for GPUs has more than 5 GB

_ACCOUNTS = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
_GROUPS = "root:x:0:\nnogroup:x:65534:\n"
_EMPTY_FOLDERS = ("usr", "etc", "proc", "sys", "dev", "tmp", "root", "opt", "var", "run", "mnt")


@dataclass(frozen=True, slots=True)
class Image:
    """An image of one layer: what is in it, and how a container of it starts."""

    name: str
    root: Path
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def write(self, archive: Path) -> Path:
        """Write the image as a tar file in OCI layout (image-spec v1.1) and return its path.

        Equal content gives an equal image id: times and owners are left out.
        """
        layer = _tar(self._files())
        layer_digest = _digest(layer)
        architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        config = _encode(
            {
                "architecture": architecture,
                "os": "linux",
                "config": {
                    "Entrypoint": list(self.entrypoint),
                    "Cmd": list(self.command),
                    "Env": [f"{name}={value}" for name, value in self.environment.items()],
                },
                "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
            }
        )
        manifest = _encode(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
                "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
            }
        )
        reference = {
            **_descriptor("application/vnd.oci.image.manifest.v1+json", manifest),
            "platform": {"architecture": architecture, "os": "linux"},
            "annotations": {"io.containerd.image.name": self.name, "org.opencontainers.image.ref.name": self.name},
        }
        index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [reference]}
        blobs = {f"blobs/sha256/{_digest(blob)[7:]}": blob for blob in (config, manifest, layer)}
        files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": _encode(index), **blobs}
        archive.write_bytes(_tar([(_entry(name, size=len(data)), data) for name, data in files.items()]))
        return archive

    def _files(self) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        """Yield the layer's entries in a fixed order, parents first."""
        for path in sorted(self.root.rglob("*")):
            name, mode = str(path.relative_to(self.root)), path.lstat().st_mode & 0o7777
            if path.is_symlink():
                entry = _entry(name, kind=tarfile.SYMTYPE)
                entry.linkname = os.readlink(path)
                yield entry, b""
            elif path.is_dir():
                yield _entry(name, mode=mode, kind=tarfile.DIRTYPE), b""
            else:
                data = path.read_bytes()
                yield _entry(name, mode=mode, size=len(data)), data


def write_pause(folder: Path, program: Path) -> Path:
    """Write the image of every pod's first process, from a static program; returns the archive in `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        _install(program, Path(scratch, "pause"))
        return Image(PAUSE, Path(scratch), entrypoint=["/pause"]).write(folder / "pause.tar")


def fill_root(root: Path) -> None:
    """Fill a new folder with the empty folders and the accounts that programs expect of a root file system."""
    for name in _EMPTY_FOLDERS:
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text(_ACCOUNTS)
    (root / "etc" / "group").write_text(_GROUPS)
    (root / "etc" / "nsswitch.conf").write_text("hosts: files dns\n")


def _install(program: Path, target: Path) -> None:
    target.write_bytes(program.read_bytes())
    target.chmod(0o755)


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _entry(name: str, *, mode: int = 0o644, size: int = 0, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.size, entry.type = mode, size, kind
    return entry


def _tar(entries: Iterator[tuple[tarfile.TarInfo, bytes]] | Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry, data in entries:
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
