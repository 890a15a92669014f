"""`transformers serve`, the server that comes with transformers."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.environments import environment
from benchmarks.servers import Server

VERSION = "5.24.0"


def transformers_serve(model: Path, *, port: int, dtype: str) -> Server:
    """`transformers serve --continuous-batching`.

    It has no ignore_eos; a generation config with an end-of-sequence token that never comes does the same.

    Args:
        dtype: of the weights.
    """
    folder = environment("transformers", [f"transformers[serving]=={VERSION}", "torch==2.15.0", "accelerate"])
    options = f"--continuous-batching --device cpu --dtype {dtype} --attn-implementation sdpa"
    blocks = "--cb-num-blocks 64 --cb-max-batch-tokens 512"
    return Server(
        name="transformers serve",
        command=(
            str(folder / "bin" / "transformers"),
            "serve",
            str(model),
            *f"{options} {blocks} --host 127.0.0.1 --port {port}".split(),
        ),
        port=port,
        ready_path="/health",
        body={
            "model": str(model),
            "generation_config": json.dumps({"eos_token_id": -1, "pad_token_id": 0, "do_sample": False}),
        },
        version=VERSION,
        environment={"HF_HUB_OFFLINE": "1"},
    )
