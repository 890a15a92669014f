"""OpenVINO GenAI's continuous batching, in process: it has no HTTP server on PyPI.

Its row therefore carries no HTTP, JSON or streaming, which is in its favour. `openvino_driver` runs in its environment.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.environments import PEERS, environment, say
from benchmarks.servers import Driver

VERSION = "2026.4.1"
_PACKAGES = (f"openvino-genai=={VERSION}", "openvino", "openvino-tokenizers", "optimum-intel[openvino]")
_OVERRIDES = ("torch==2.13.0", 'torchvision; python_version < "3"')


def openvino(model: Path, *, weights: str, precision: str | None = None) -> Driver:
    """A ContinuousBatchingPipeline on this model.

    Args:
        weights: int8, or fp16 for float weights, as optimum's export calls them.
        precision: INFERENCE_PRECISION_HINT, such as f32; None leaves it to the plugin.
    """
    folder = environment("openvino", _PACKAGES, _OVERRIDES)
    exported = PEERS / f"openvino-{model.name}-{weights}"
    if not (exported / "openvino_model.bin").exists():
        say(f"exporting {model.name} to OpenVINO, {weights} (about a minute) …")
        partial = exported.with_suffix(".partial")
        command = [str(folder / "bin" / "optimum-cli"), "export", "openvino", "--model", str(model)]
        task = ["--task", "text-generation-with-past", "--weight-format", weights, str(partial)]
        subprocess.run([*command, *task], check=True)
        partial.rename(exported)
    label = "int8" if weights == "int8" else (precision or "bf16")
    script = Path(__file__).with_name("openvino_driver.py")
    return Driver(
        name=f"OpenVINO {label}",
        # -P: this folder's modules are named like what the driver imports
        command=(str(folder / "bin" / "python"), "-P", str(script), str(exported), *([precision] if precision else [])),
        version=VERSION,
    )
