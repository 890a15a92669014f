"""Downloads from the hub: whole or not at all, only what is needed, and every refusal by name.

The hub is a small HTTP server on the loopback interface that answers as the real one does.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic

import pytest

from paceline_server.errors import EngineFailed, ModelNotFound, ModelUnauthorized, ModelUnsupported
from paceline_server.model.hub import download
from paceline_server.model.store import HubModel

MODEL = HubModel("org", "name")
COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"open('canary', 'w')",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.safetensors": b"and again",
    "onnx/config.json": b"of another format",
    "README.md": b"# name",
}


class FakeHub(ThreadingHTTPServer):
    """Serves one repository, or one refusal."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        self.refusal: tuple[int, str] | None = None
        self.broken: set[str] = set()
        self.served: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        if self.server.refusal is not None:
            status, code = self.server.refusal
            self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code}, body=body)
        elif self.path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in self.server.files]
            listing = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
            if "/tree/" in self.path:
                content = json.dumps([_entry(name, data) for name, data in self.server.files.items()]).encode()
            else:
                content = json.dumps(listing).encode()
            self._send(200, content, {"Content-Type": "application/json"}, body=body)
        else:
            name = self.path.split(f"/resolve/{COMMIT}/")[1]
            if name in self.server.broken:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
                return
            data = self.server.files[name]
            if body:
                self.server.served.append(name)
            etag = hashlib.sha1(data).hexdigest()
            self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body=body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_takes_weights_json_and_templates_and_neither_pickles_nor_code(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "org" / "name"
    download(MODEL, folder, hub.endpoint)
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert set(hub.served) == wanted
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_the_modules_of_a_sentence_encoder_come_along(hub: FakeHub, tmp_path: Path) -> None:
    hub.files |= {"modules.json": b"[]", "1_Pooling/config.json": b"{}"}
    folder = tmp_path / "org" / "name"
    download(MODEL, folder, hub.endpoint)
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"{}"
    assert not (folder / "onnx").exists()


def test_an_interrupted_download_leaves_no_model_and_the_next_one_completes_it(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "org" / "name"
    hub.broken = {"model.safetensors"}
    with pytest.raises(ModelNotFound):
        download(MODEL, folder, hub.endpoint)
    assert not folder.exists()
    hub.broken = set()
    download(MODEL, folder, hub.endpoint)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_two_processes_that_want_the_same_model_download_it_once(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "org" / "name"
    threads = [threading.Thread(target=download, args=(MODEL, folder, hub.endpoint)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hub.served.count("model.safetensors") == 1


def test_a_model_without_safetensors_is_refused_before_anything_is_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"], hub.files["consolidated.safetensors"], hub.files["onnx/model.safetensors"]
    with pytest.raises(ModelUnsupported, match="safetensors"):
        download(MODEL, tmp_path / "org" / "name", hub.endpoint)
    assert hub.served == []


@pytest.mark.parametrize(
    ("status", "code", "token", "error", "message"),
    [
        (404, "RepoNotFound", None, ModelNotFound, r"neither in the model store .* nor on the hub \(404\)"),
        (401, "RepoNotFound", None, ModelNotFound, "a private model needs HF_TOKEN"),
        (401, "RepoNotFound", "hf_wrong", ModelUnauthorized, "this HF_TOKEN"),
        (403, "GatedRepo", "hf_other", ModelUnauthorized, "gated"),
        (401, "GatedRepo", None, ModelUnauthorized, "gated"),
        (404, "RevisionNotFound", None, ModelNotFound, "revision"),
    ],
)
def test_each_refusal_of_the_hub_has_its_own_reason(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    token: str | None,
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.refusal = (status, code)
    with pytest.raises(error, match=message):
        download(MODEL, tmp_path / "org" / "name", hub.endpoint)


def test_without_a_network_the_answer_names_both_places_within_seconds(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        folder = tmp_path / "org" / "name"
        begin = monotonic()
        with pytest.raises(ModelNotFound, match=f"not in the model store .*{folder}.* hub does not answer"):
            download(MODEL, folder, f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert monotonic() - begin < 10


def test_a_store_that_cannot_be_written_is_named(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "org").write_text("a file where the organisation's folder should be")
    with pytest.raises(EngineFailed, match=r"cannot write .* into the model store"):
        download(MODEL, tmp_path / "org" / "name", hub.endpoint)


def test_a_model_that_does_not_exist_is_not_blamed_on_the_store(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "org").write_text("a file where the organisation's folder should be")
    hub.refusal = (404, "RepoNotFound")
    with pytest.raises(ModelNotFound):
        download(MODEL, tmp_path / "org" / "name", hub.endpoint)
