"""Reads a model's folder into memory: transformers' classes, our attention, safetensors only, never the folder's code.

`transformers_backend` and `encoder_startup` call it; `CausalModel` is what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from paceline_server.errors import ModelUnsupported, OutOfMemory
from paceline_server.model import config_file
from paceline_server.model.attention.hook import IMPLEMENTATION
from paceline_server.model.cache import GIB
from paceline_server.model.checkpoint import Checkpoint, require_room
from paceline_server.model.fused_layers import note_unused
from paceline_server.model.support import require_supported

_CANNOT_BE_READ = (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)
"""What transformers raises for a configuration that makes no sense to it."""


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A decoder in two parts, because most rows of a step need no logits. Both are torch modules of transformers.

    Attributes:
        config: transformers' configuration object.
        decoder: token ids to hidden states.
        head: hidden states to logits.
        logits_scale: factor of the logits.
        logits_softcap: logits l become softcap * tanh(l / softcap) (Gemma 2); None leaves them.
    """

    config: Any
    decoder: Any
    head: Any
    logits_scale: float
    logits_softcap: float | None

    def hidden_states(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the decoder over packed tokens: two [T] to [T, hidden]. The attention back end knows whose they are."""
        output = self.decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[R, hidden] to [R, vocabulary], in float32."""
        logits: Tensor = self.head(hidden_states).float()
        if self.logits_scale != 1.0:
            logits = logits * self.logits_scale
        return logits if self.logits_softcap is None else self.logits_softcap * torch.tanh(logits / self.logits_softcap)


def read_config(folder: Path, require: Callable[[Mapping[str, Any]], None] = require_supported) -> Any:
    """The model's configuration, as a transformers object.

    Args:
        require: raises ModelUnsupported for what we do not honour.

    Raises:
        ModelUnsupported: it asks for something that we do not honour, or it cannot be understood.
    """
    config_file.read(folder, require)  # before transformers sees it: its answer to custom code is a question
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _CANNOT_BE_READ as error:
        raise ModelUnsupported(f"transformers cannot read {folder / 'config.json'}: {error}") from error
    require(config.to_dict())  # again, with the defaults of the family
    return config


def load_model(folder: Path, config: Any, dtype: torch.dtype, device: torch.device, available: int) -> CausalModel:
    """Read the weights.

    Args:
        folder: the model's.
        config: from `read_config`.
        dtype: of the weights in memory.
        device: where they go.
        available: bytes of memory that may be taken on a CPU.

    Raises:
        OutOfMemory: the weights do not fit.
        ModelNotFound: a file is damaged.
        ModelUnsupported: files and configuration do not go together.
    """
    model = read_weights(AutoModelForCausalLM, folder, config, dtype, device, available, attention=IMPLEMENTATION)
    scaling = getattr(config, "logits_scaling", 1.0)  # Granite divides
    softcap = getattr(config, "final_logit_softcapping", None)
    return CausalModel(config, model.get_decoder(), model.get_output_embeddings(), 1.0 / scaling, softcap)


def read_weights(
    kind: Any, folder: Path, config: Any, dtype: torch.dtype, device: torch.device, available: int, **options: Any
) -> Any:
    """A model of one of transformers' Auto classes, in evaluation mode.

    Args:
        kind: the Auto class.
        available: bytes of memory that may be taken on a CPU.
        options: of its `from_pretrained`; `attention` is the name of the implementation.

    Raises:
        OutOfMemory: the weights do not fit.
        ModelNotFound: a file is damaged.
        ModelUnsupported: files and configuration do not go together.
    """
    name = str(dtype).removeprefix("torch.")
    with Checkpoint(folder) as checkpoint:
        needed = checkpoint.bytes_in(name)
    if device.type == "cpu":
        require_room(needed, name, available)
    model = _from_pretrained(kind, folder, config, dtype, **options)
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        raise OutOfMemory(f"the weights take {needed / GIB:.2f} GiB and the GPU has not that much free") from None


def _from_pretrained(
    kind: Any, folder: Path, config: Any, dtype: torch.dtype, *, attention: str, **options: Any
) -> Any:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # what it would warn of is refused, or said, here
    try:
        model, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # not to be ignored, but to be reported below, by name
            output_loading_info=True,
            **options,
        )
    except (*_CANNOT_BE_READ, RuntimeError, OSError, SafetensorError) as error:
        raise ModelUnsupported(f"transformers cannot load {folder}: {error!r}") from error
    wrong = {key: sorted(map(str, report[key])) for key in ("missing_keys", "mismatched_keys") if report.get(key)}
    if wrong:
        names = "; ".join(f"{key.replace('_', ' ')}: {', '.join(names[:3])}" for key, names in wrong.items())
        raise ModelUnsupported(f"the weights of {folder} do not go with its config.json: {names}")
    if kind is AutoModelForCausalLM:  # encoders' files hold a pooler that nobody asks for
        note_unused(folder, map(str, report.get("unexpected_keys", ())))
    return model.eval()
