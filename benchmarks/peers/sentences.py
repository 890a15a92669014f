"""sentence-transformers' own `encode` behind HTTP, as one serves it without a server made for it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.environments import environment
from benchmarks.servers import Server

VERSION = "6.2.0"
_DRIVER = Path(__file__).with_name("sentence_server.py")


def sentence_transformers(model: Path, *, port: int, threads: int) -> Server:
    """One process, one `encode` a request, one after the other: see `sentence_server`."""
    packages = [f"sentence-transformers=={VERSION}", "torch==2.15.0", "transformers==5.24.0", "aiohttp==3.14.5"]
    folder = environment("sentence-transformers", packages)
    return Server(
        name="sentence-transformers",
        command=(str(folder / "bin" / "python"), str(_DRIVER), str(model), str(port), str(threads)),
        port=port,
        ready_path="/readyz",
        body={"model": "m"},
        version=VERSION,
        environment={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
