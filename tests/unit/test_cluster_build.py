"""The programs of the test clusters are built once, whole or not at all; images are what containerd expects."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
from cluster import build, cache
from cluster.errors import Failed
from cluster.images import Image

# a Go that "compiles": writes its arguments to the output file, or half a file and an error
GO = """\
#!/bin/sh
[ "$1" = env ] && { echo "{version}"; exit 0; }
while [ "$1" != -o ]; do shift; done
printf half > "$2"
[ -e "{broken}" ] && { echo "undefined: everything" >&2; exit 1; }
printf whole > "$2"; chmod +x "$2"
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose existence breaks the compiler that is on PATH; the cache is empty."""
    marker, go = tmp_path / "broken", tmp_path / "programs" / "go"
    go.parent.mkdir()
    go.write_text(GO.replace("{version}", "go1.99.1").replace("{broken}", str(marker)))
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return marker


def test_a_failed_build_leaves_no_half_program_and_the_next_run_goes_on(broken: Path) -> None:
    build.build(["pause"])
    broken.touch()
    with pytest.raises(Failed, match="undefined: everything"):
        build.build(["pause", "coredns"])
    assert sorted(path.name for path in cache.binaries().iterdir()) == [".lock", "pause"]
    broken.unlink()
    build.build(["pause", "coredns"])
    assert (cache.binaries() / "coredns").read_text() == "whole"


def test_what_is_built_is_not_built_again(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.build(["pause"])
    assert "[1/1] pause: done" in capsys.readouterr().out
    broken.touch()
    build.build(["pause"])
    assert "are in" in capsys.readouterr().out


def test_an_image_archive_holds_together(tmp_path: Path) -> None:
    """Every descriptor's digest and size are those of the blob it names, from the index down to the layer."""
    blobs = read(image(tmp_path).write(tmp_path / "image.tar"))
    index = json.loads(blobs["index.json"])
    (manifest_reference,) = index["manifests"]
    assert manifest_reference["annotations"]["io.containerd.image.name"] == "paceline.test/tool:1"
    manifest = json.loads(resolve(blobs, manifest_reference))
    config = json.loads(resolve(blobs, manifest["config"]))
    assert config["config"]["Env"] == ["PATH=/bin"]
    (layer,) = manifest["layers"]
    resolve(blobs, layer)
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]


def test_equal_content_gives_an_equal_image(tmp_path: Path) -> None:
    first = image(tmp_path).write(tmp_path / "first.tar").read_bytes()
    (tmp_path / "root" / "bin" / "tool").touch()  # a newer time, the same content
    assert image(tmp_path).write(tmp_path / "second.tar").read_bytes() == first


def image(folder: Path) -> Image:
    root = folder / "root"
    (root / "bin").mkdir(parents=True, exist_ok=True)
    (root / "bin" / "tool").write_bytes(b"program")
    (root / "bin" / "link").unlink(missing_ok=True)
    (root / "bin" / "link").symlink_to("tool")
    return Image("paceline.test/tool:1", root, entrypoint=["/bin/tool"], environment={"PATH": "/bin"})


def read(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}


def resolve(blobs: dict[str, bytes], descriptor: dict[str, object]) -> bytes:
    digest = str(descriptor["digest"])
    blob = blobs[f"blobs/sha256/{digest.removeprefix('sha256:')}"]
    assert hashlib.sha256(blob).hexdigest() == digest.removeprefix("sha256:")
    assert len(blob) == descriptor["size"]
    return blob
