"""Downloads a model from the Hugging Face hub into the store, whole or not at all. Called by `phases`.

Only what a server reads is taken: safetensors weights, JSON, the tokenizer's files and the chat template. Pickles and
Python files stay on the hub.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]  # its HTTP client's root

from paceline_server.errors import EngineFailed, ModelNotFound, ModelUnauthorized, ModelUnsupported
from paceline_server.model.store import HubModel, require_model

ANSWER_SECONDS = 5.0
"""How long the hub may take to answer the first question: is there such a model?"""

_WANTED_SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model"}
_DUPLICATES = ("consolidated", "original")
"""Prefixes of weights that some authors publish a second time in a layout of their own."""


def download(model: HubModel, folder: Path, endpoint: str | None = None) -> None:
    """Fetch a model's files into `folder`, which appears only when it is complete.

    Processes that want the same model take turns; one that was interrupted goes on where it ended. `endpoint` is the
    hub's address; None is the client's own default.

    Raises:
        ModelNotFound: neither in the store nor on the hub, or the hub does not answer.
        ModelUnauthorized: the hub wants a (better) token.
        ModelUnsupported: the hub has the model without safetensors weights.
        EngineFailed: the store cannot be written.
    """
    try:
        commit, names = _published(model, endpoint)  # first: that there is no such model matters most
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _turn(folder):
            if not folder.is_dir() or not any(folder.iterdir()):
                _fetch(model, folder, endpoint, commit, names)
    except GatedRepoError:
        raise ModelUnauthorized(
            f"{model.uri} is gated: accept its terms on the hub and give HF_TOKEN of that account"
        ) from None
    except RevisionNotFoundError:
        raise ModelNotFound(f"{model.repository} has no revision {model.revision!r} on the hub") from None
    except HfHubHTTPError as error:
        raise _refused(model, folder, error) from None
    except (TransportError, LocalEntryNotFoundError, ConnectionError) as error:
        raise ModelNotFound(
            f"{model.uri} is not in the model store ({folder}), and the hub does not answer ({error})"
        ) from None
    except OSError as error:
        raise EngineFailed(f"cannot write {model.uri} into the model store {folder.parent}: {error}") from None


def _fetch(model: HubModel, folder: Path, endpoint: str | None, commit: str | None, names: list[str]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    snapshot_download(
        model.repository, revision=commit, local_dir=partial, allow_patterns=names, endpoint=endpoint, max_workers=4
    )
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the client's book-keeping for a download under way
    require_model(partial)
    partial.replace(folder)


def _published(model: HubModel, endpoint: str | None) -> tuple[str | None, list[str]]:
    """The commit behind the revision, and the names of the files that we want of it."""
    info = HfApi(endpoint=endpoint).model_info(model.repository, revision=model.revision, timeout=ANSWER_SECONDS)
    names = [sibling.rfilename for sibling in info.siblings or () if _wanted(sibling.rfilename)]
    if not any(name.endswith(".safetensors") for name in names):
        raise ModelUnsupported(f"{model.uri} is published without safetensors weights; no other format is loaded")
    return info.sha, names


def _wanted(name: str) -> bool:
    path = PurePosixPath(name)
    if len(path.parts) == 2:  # a module of sentence-transformers, such as 1_Pooling
        return path.name == "config.json" and path.parts[0][:1].isdigit()
    return len(path.parts) == 1 and path.suffix in _WANTED_SUFFIXES and not path.name.startswith(_DUPLICATES)


def _refused(model: HubModel, folder: Path, error: HfHubHTTPError) -> ModelNotFound | ModelUnauthorized:
    status = error.response.status_code
    token_given = bool(os.environ.get("HF_TOKEN"))
    if status == 403 or (status == 401 and token_given):
        return ModelUnauthorized(f"the hub refuses {model.uri} to this HF_TOKEN ({status})")
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        advice = "" if token_given else "; a private model needs HF_TOKEN"
        return ModelNotFound(f"{model.uri} is neither in the model store ({folder}) nor on the hub ({status}){advice}")
    return ModelNotFound(f"{model.uri} is not in the model store ({folder}), and the hub answers {status}")


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Hold the only right to write `folder`, across processes."""
    with (folder.with_name(f".{folder.name}.lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
