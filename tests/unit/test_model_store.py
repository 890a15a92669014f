"""The model store: URIs become folders, and an incomplete folder is never taken for a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline_server.errors import InvalidConfiguration, ModelNotFound, ModelUnsupported
from paceline_server.model.store import HubModel, parse, resolve, store_root


def write_model(folder: Path, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / weights).write_bytes(b"")
    return folder


def no_fetch(model: HubModel, folder: Path) -> None:
    raise AssertionError(f"{model} was fetched into {folder}")


@pytest.mark.parametrize(
    ("uri", "meaning"),
    [
        ("hf://org/name", HubModel("org", "name")),
        ("hf://Org-1/a.b_c@v1.0", HubModel("Org-1", "a.b_c", "v1.0")),
        ("hf://org/name@refs/pr/3", HubModel("org", "name", "refs/pr/3")),
        ("file:///models/a%20b", Path("/models/a b")),
        ("/models/a", Path("/models/a")),
        ("models/a", Path("models/a")),
    ],
)
def test_every_form_of_a_model_path_is_understood(uri: str, meaning: HubModel | Path) -> None:
    assert parse(uri) == meaning


@pytest.mark.parametrize("uri", ["s3://bucket/m", "oci://registry/m", "pvc://claim/m", "https://x/y"])
def test_a_scheme_that_is_not_served_is_refused_by_its_name(uri: str) -> None:
    with pytest.raises(InvalidConfiguration, match=uri.split(":")[0]):
        parse(uri)


@pytest.mark.parametrize(
    "uri", ["hf://name", "hf://a/b/c", "hf://../b", "hf://a/..", "hf://a/b@", "file://host/x", "hf://"]
)
def test_a_malformed_name_is_refused(uri: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"engine.model_path"):
        parse(uri)


def test_a_model_in_the_store_is_not_fetched(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "org" / "name")
    assert resolve("hf://org/name", tmp_path, no_fetch) == folder


def test_a_pinned_revision_is_not_served_from_another_one(tmp_path: Path) -> None:
    write_model(tmp_path / "org" / "name")
    fetched = []

    def fetch(model: HubModel, folder: Path) -> None:
        fetched.append(model.revision)
        write_model(folder)

    folder = resolve("hf://org/name@refs/pr/3", tmp_path, fetch)
    assert fetched == ["refs/pr/3"]
    assert folder != tmp_path / "org" / "name"
    assert resolve("hf://org/name@refs/pr/3", tmp_path, no_fetch) == folder


def test_an_empty_folder_in_the_store_is_fetched_into(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)

    def fetch(model: HubModel, folder: Path) -> None:
        folder.rmdir()
        write_model(folder)

    assert resolve("hf://org/name", tmp_path, fetch) == tmp_path / "org" / "name"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    ],
)
def test_an_incomplete_folder_is_reported_with_what_is_missing(tmp_path: Path, spoil, message: str) -> None:
    folder = write_model(tmp_path / "m")
    spoil(folder)
    with pytest.raises(ModelNotFound, match=message):
        resolve(str(folder), tmp_path, no_fetch)


def test_a_missing_shard_is_reported_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match="model-00002-of-00002"):
        resolve(f"file://{folder}", tmp_path, no_fetch)


@pytest.mark.parametrize(
    "index",
    [
        *("", "{", "[]", "{}", "[" * 9_999),
        *(f'{{"weight_map": {said}}}' for said in ("null", "[]", "{}", '{"a": 1}', '{"a": []}', '{"a": ""}')),
        *(f'{{"weight_map": {{"a": "{name}"}}}}' for name in ("../model.safetensors", "/etc/passwd", "..", "a/b")),
    ],
    ids=lambda index: index[:40],
)
def test_an_index_that_names_no_files_of_the_folder_is_reported(tmp_path: Path, index: str) -> None:
    folder = write_model(tmp_path / "m", "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelNotFound, match=r"model\.safetensors\.index\.json is damaged"):
        resolve(str(folder), tmp_path, no_fetch)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.Q4_1.gguf"])
def test_weights_in_another_format_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m", name)
    with pytest.raises(ModelUnsupported, match=name):
        resolve(str(folder), tmp_path, no_fetch)


def test_a_folder_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        resolve(str(tmp_path / "nowhere"), tmp_path, no_fetch)


def test_the_environment_names_the_store_and_home_is_the_default() -> None:
    assert store_root({"PACELINE_MODEL_STORE": "/models"}) == Path("/models")
    assert store_root({}) == Path.home() / ".cache/paceline/models"
