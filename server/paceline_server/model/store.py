"""Where models live: turns `engine.model_path` into a folder on this machine.

The model store is a folder of `ORG/NAME` folders (`ORG/NAME@REVISION` where a revision is pinned), each as transformers
writes it. What the store lacks is fetched into it; how, is the caller's affair (`hub.download`). Free of torch and of
the hub's client: `phases.find_model`, `cli` and the demo's script call it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from paceline_server.errors import InvalidConfiguration, ModelNotFound, ModelUnsupported

STORE_VARIABLE = "PACELINE_MODEL_STORE"
"""Environment variable that names the model store."""

DEFAULT_STORE = "~/.cache/paceline/models"

_HUB_NAME = re.compile(r"(?P<organisation>[\w.-]+)/(?P<name>[\w.-]+?)(@(?P<revision>[\w./-]+))?", re.ASCII)

_WEIGHTS = re.compile(r"[^/]+\.safetensors")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model by its name on the hub.

    Attributes:
        revision: branch, tag or commit; None is the newest of the default branch.
    """

    organisation: str
    name: str
    revision: str | None = None

    @property
    def repository(self) -> str:
        """ORG/NAME."""
        return f"{self.organisation}/{self.name}"

    @property
    def uri(self) -> str:
        """The way it is written in a configuration."""
        return f"hf://{self.repository}" + (f"@{self.revision}" if self.revision else "")

    def folder(self, store: Path) -> Path:
        """Its place in a store. A pinned revision has its own, so that it is never taken for another one."""
        pin = f"@{self.revision.replace('/', '--')}" if self.revision else ""
        return store / self.organisation / f"{self.name}{pin}"


Fetch = Callable[[HubModel, Path], None]
"""Brings a model's files to the folder given; all of them or an error."""


def store_root(environ: Mapping[str, str]) -> Path:
    """The model store that the environment names, or the default one in the home folder."""
    return Path(environ.get(STORE_VARIABLE) or DEFAULT_STORE).expanduser()


def parse(model_path: str) -> HubModel | Path:
    """What `engine.model_path` means.

    Raises:
        InvalidConfiguration: a scheme that is not served, or a name that no model can have.
    """
    scheme, separator, rest = model_path.partition("://")
    if not separator:
        return Path(model_path).expanduser()
    if scheme == "hf":
        match = _HUB_NAME.fullmatch(rest)
        if match is None or {match["organisation"], match["name"]} & {".", ".."}:
            raise InvalidConfiguration(f"engine.model_path: {model_path} is not of the form hf://ORG/NAME[@REVISION]")
        return HubModel(match["organisation"], match["name"], match["revision"])
    if scheme == "file":
        parts = urlsplit(model_path)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidConfiguration(f"engine.model_path: {model_path} must be file:// and an absolute path")
        return Path(unquote(parts.path))
    raise InvalidConfiguration(
        f"engine.model_path: {scheme}:// is not supported; use hf://ORG/NAME, file:///folder or a folder's path"
    )


def resolve(model_path: str, store: Path, fetch: Fetch) -> Path:
    """The model's folder, fetched into the store where it is missing.

    Raises:
        InvalidConfiguration: `model_path` cannot be understood.
        ModelNotFound: no such folder, or an incomplete one.
        ModelUnsupported: a folder without safetensors weights.
        StartupError: whatever `fetch` raises.
    """
    model = parse(model_path)
    if isinstance(model, Path):
        require_model(model)
        return model
    folder = model.folder(store)
    if not folder.is_dir() or not any(folder.iterdir()):
        fetch(model, folder)
    require_model(folder)
    return folder


def check(model_path: str, store: Path) -> None:
    """Refuse at once what `resolve` would refuse later: everything that can be known without the hub.

    Raises:
        InvalidConfiguration: `model_path` cannot be understood.
        ModelNotFound: no such folder, or an incomplete one.
        ModelUnsupported: a folder without safetensors weights.
    """
    model = parse(model_path)
    folder = model if isinstance(model, Path) else model.folder(store)
    if isinstance(model, Path) or (folder.is_dir() and any(folder.iterdir())):
        require_model(folder)


def require_model(folder: Path) -> None:
    """Check that a folder holds all files of one model, by their names only.

    Raises:
        ModelNotFound: the folder or one of its files is missing.
        ModelUnsupported: the weights are there in another format only.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} is not a model's folder: it has no config.json")
    if any(folder.glob("*.safetensors")):
        missing = [name for name in weight_files(folder) if not (folder / name).is_file()]
        if missing:
            raise ModelNotFound(f"{folder} is incomplete: {', '.join(missing)} missing; remove it to fetch it again")
        return
    others = sorted(path.name for suffix in ("bin", "pt", "pth", "gguf") for path in folder.glob(f"*.{suffix}"))
    if others:
        raise ModelUnsupported(
            f"{folder} has its weights as {', '.join(others[:3])}; only safetensors files are loaded "
            "(a GGUF file can be converted: python -m paceline_server.convert FILE FOLDER)"
        )
    raise ModelNotFound(f"{folder} has no weights: no *.safetensors file")


def weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights: those of the index where there is one, else the single file.

    Raises:
        ModelNotFound: the index is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(index)
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _indexed(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelNotFound(f"{index} is damaged ({error!r}); remove the folder to fetch it again") from None
    if not names or not all(isinstance(name, str) and _WEIGHTS.fullmatch(name) for name in names):
        raise ModelNotFound(f"{index} is damaged: its weight_map must name safetensors files of the folder")
    return sorted(names)
