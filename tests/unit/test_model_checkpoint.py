"""Weights as they lie in their files: read without torch, in every format that weights are stored in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.errors import ModelUnsupported
from paceline_server.model.checkpoint import Checkpoint
from paceline_server.model.formats import narrowed, widened
from paceline_server.model.startup import load
from paceline_server.model.testing import save_tiny_model, tiny_config

BATCH = StepBatch([SequenceSlice([5, 6, 7, 8, 9], 0, [0, 1], SamplingParams())])


def test_a_server_on_the_kernels_never_imports_torch_or_transformers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    program = (
        "import json, sys; from paceline_server.config import parse; from paceline_server.engine import process;"
        "loaded = process._load(parse(json.loads(sys.argv[1])), lambda phase: None);"
        "from paceline_server.engine.batch import *; sampling = SamplingParams(temperature=1.0, top_p=0.9);"
        "loaded.runner.execute(StepBatch([SequenceSlice([5, 6], 0, [0], sampling)]));"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)), loaded.info.attention_backend)"
    )
    config = tiny_config(tmp_path, engine={"device": "auto"}).model_dump_json()
    run = subprocess.run([sys.executable, "-c", program, config], capture_output=True, text=True, check=True)
    has_gpu = torch.cuda.is_available()
    assert has_gpu or run.stdout == "[] cpu\n"


def test_bfloat16_numbers_are_rounded_as_torch_rounds_them() -> None:
    floats = torch.randn(10_000, generator=torch.manual_seed(0))
    floats[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38])
    expected = floats.to(torch.bfloat16)
    result = widened(narrowed(floats.numpy()))
    np.testing.assert_array_equal(result, expected.float().numpy())


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_every_format_are_served_in_every_format(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    own = load(tiny_config(tmp_path, engine={"dtype": dtype}), lambda _: None)
    engine = {"dtype": dtype, "attention_backend": "reference"}
    reference = load(tiny_config(tmp_path, engine=engine), lambda _: None)
    assert own.info.attention_backend == "cpu"
    expected = torch.as_tensor(reference.runner.logits(BATCH))
    tolerance = 1e-3 if dtype == "float32" else 0.1
    torch.testing.assert_close(torch.as_tensor(own.runner.logits(BATCH)), expected, rtol=tolerance, atol=tolerance)


def test_quantized_numbers_are_no_weights(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelUnsupported, match=r"are I8 \(model.norm.weight\)"):
        checkpoint.read("model.norm.weight", "float32")


def test_shards_are_one_checkpoint_and_a_decoder_saved_alone_has_its_embedding_as_head(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tie_word_embeddings=True)
    whole = load(tiny_config(tmp_path), lambda _: None).runner.logits(BATCH)
    tensors = {
        name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"1.safetensors": names[::2], "2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file, {"format": "pt"})
    places = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    np.testing.assert_array_equal(load(tiny_config(tmp_path), lambda _: None).runner.logits(BATCH), whole)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_tensors_that_nothing_is_computed_from_are_named_in_the_log(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model(tmp_path)
    config = tiny_config(folder, engine={"attention_backend": backend})
    load(config, lambda _: None)
    assert not [record for record in caplog.records if "has no use" in record.message]

    tensors = load_file(folder / "model.safetensors")
    spare = {f"model.layers.{layer}.self_attn.q_proj.bias": torch.ones(48) for layer in range(3)}
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | spare | computed, folder / "model.safetensors", metadata={"format": "pt"})
    load(config, lambda _: None)
    (said,) = [record.message for record in caplog.records if "has no use" in record.message]
    assert "holds 3 tensors" in said
    assert "model.layers.0.self_attn.q_proj.bias" in said
