"""Where built programs and demo models are kept between runs, outside the source tree.

Used by everything in this folder and by the fixtures in `tests/conftest.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

from cluster.errors import Unavailable

KUBERNETES = "v1.34.4"


def root() -> Path:
    """Return the cache folder, `$PACELINE_CACHE` or `~/.cache/paceline`."""
    return Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser()


def binaries() -> Path:
    """Return the folder of the Kubernetes programs; one a release, so that a new release is a new build."""
    return root() / f"kube-{KUBERNETES}"


def model_store() -> Path:
    """Return the folder of models, `$PACELINE_MODEL_STORE` or `models` in the cache."""
    named = os.environ.get("PACELINE_MODEL_STORE")
    return Path(named).expanduser() if named else root() / "models"


def require(*names: str) -> Path:
    """Return the folder of the Kubernetes programs, once all of `names` are in it.

    Raises:
        Unavailable: naming the missing programs and the command that builds them.
    """
    folder = binaries()
    missing = [name for name in names if not os.access(folder / name, os.X_OK)]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not built in {folder}: run `make cluster` once (ten minutes or more)")
    return folder
