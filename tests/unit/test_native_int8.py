"""int8: the rotation that takes outliers out of activations, and how near the quantized model stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.model.formats import Floats
from paceline_server.model.rotation import Rotation, rotate_stream, rotate_values
from paceline_server.model.startup import load
from paceline_server.model.testing import save_tiny_model, tiny_config

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("size", [1, 8, 48, 97, 576, 2560])
def test_a_rotation_is_orthogonal_and_spreads_every_channel(size: int) -> None:
    identity = np.eye(size, dtype=np.float32)
    matrix = Rotation(size).apply(identity)
    np.testing.assert_allclose(matrix @ matrix.T, identity, rtol=0, atol=1e-5)
    assert np.abs(matrix).max() <= 1.5 / size**0.5 or size == 1
    np.testing.assert_allclose(Rotation(size).apply_left(identity), matrix.T, rtol=1e-5, atol=1e-6)


def rms_norm(rows: Floats, weight: Floats) -> Floats:
    normed: Floats = rows / np.sqrt(np.square(rows).mean(-1, keepdims=True)) * weight
    return normed


def normal(*shape: int) -> Floats:
    return RANDOM.standard_normal(shape, dtype=np.float32)


def random_layer() -> dict[str, Floats]:
    """Hidden 48; 4 heads and 2 key/value heads of 8; MLP of 20."""
    sizes = {"query": (32, 48), "key": (16, 48), "value": (16, 48), "output": (48, 32)}
    sizes |= {"gate": (20, 48), "up": (20, 48), "down": (48, 20)}
    weights = {name: normal(*size) for name, size in sizes.items()}
    return weights | {name: normal(48) for name in ("attention_norm", "mlp_norm", "output_bias", "down_bias")}


def test_a_rotated_layer_reads_and_writes_the_rotated_stream() -> None:
    before = random_layer()
    after: dict[str, Any] = dict(before)
    rotation = Rotation(48)
    rotate_stream(after, rotation)
    stream = normal(5, 48)
    turned = rotation.apply(stream)
    for norm, names in (("attention_norm", ("query", "key", "value")), ("mlp_norm", ("gate", "up"))):
        for name in names:
            expected = rms_norm(stream, before[norm]) @ before[name].T
            result = rms_norm(turned, after[norm]) @ after[name].T
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    attended = normal(5, 32)
    expected = rotation.apply(attended @ before["output"].T + before["output_bias"])
    result = attended @ after["output"].T + after["output_bias"]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_rotated_values_come_out_of_the_output_projection_unchanged() -> None:
    before = random_layer() | {"value_bias": normal(16)}
    after: dict[str, Any] = dict(before)
    rotate_values(after, head_dim=8)
    rows = normal(5, 48)

    def through(weights: dict[str, Any]) -> Floats:
        values = (rows @ weights["value"].T + weights["value_bias"]).reshape(5, 2, 8)
        outputs: Floats = values.repeat(2, axis=1).reshape(5, 32) @ weights["output"].T
        return outputs

    np.testing.assert_allclose(through(after), through(before), rtol=1e-4, atol=1e-4)
    assert np.abs(after["value"] - before["value"]).max() > 0.1


@pytest.mark.parametrize(
    ("family", "kv_heads"),
    [("gemma2", 1), ("gemma2", 2), ("llama", 1), ("llama", 6), ("olmo2", 2), ("phi3", 2), ("qwen2", 1)],
)
def test_int8_logits_stay_near_those_of_float32(family: str, kv_heads: int, tmp_path: Path) -> None:
    settings = {"sliding_window": None, "num_key_value_heads": kv_heads}
    save_tiny_model(tmp_path, family, initializer_range=0.1, **settings)
    batch = StepBatch([SequenceSlice(list(range(3, 43)), 0, range(10), SamplingParams())])
    exact = load(tiny_config(tmp_path), lambda _: None).runner.logits(batch)
    engine = {"quantization": "int8", "dtype": "float32"}
    quantized = load(tiny_config(tmp_path, engine=engine), lambda _: None).runner.logits(batch)
    assert exact.std() > 0.1
    error = np.linalg.norm(quantized - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.05


def test_int8_products_of_weights_of_one_sign_do_not_overflow(tmp_path: Path) -> None:
    # OLMo 2's stream is not rotated, so the kernels see these weights as they are.
    weights = load_file(save_tiny_model(tmp_path, "olmo2", initializer_range=0.1) / "model.safetensors")
    same = {name: np.full_like(weights[name], 0.05) for name in weights if "gate_proj" in name or "up_proj" in name}
    save_file(weights | same, tmp_path / "model.safetensors", {"format": "pt"})
    batch = StepBatch([SequenceSlice(list(range(3, 43)), 0, range(10), SamplingParams())])
    exact = load(tiny_config(tmp_path), lambda _: None).runner.logits(batch)
    engine = {"quantization": "int8", "dtype": "float32"}
    quantized = load(tiny_config(tmp_path, engine=engine), lambda _: None).runner.logits(batch)
    assert 0 < np.linalg.norm(quantized - exact) / np.linalg.norm(exact) < 0.05


def test_the_cache_beside_quantized_weights_is_bfloat16_unless_it_is_said(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    engine = {"quantization": "int8", "dtype": "float32"}
    formats = [
        load(tiny_config(tmp_path, engine=engine, kv_cache={"dtype": dtype}), lambda _: None).info.kv_dtype
        for dtype in ("auto", "int8")
    ]
    assert formats == ["bfloat16", "int8"]


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 1.9), ("int8", 3.7)])
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_smaller_cache_holds_more_and_stays_near_float32(
    family: str, dtype: str, times: float, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, family, initializer_range=0.1, head_dim=64)
    exact = load(tiny_config(tmp_path), lambda _: None)
    small = load(tiny_config(tmp_path, kv_cache={"dtype": dtype}), lambda _: None)
    assert small.info.kv_dtype == dtype
    assert small.info.num_blocks > times * exact.info.num_blocks
    tokens = list(range(3, 43))
    results = []
    for loaded in (exact, small):
        for begin, end in ((0, 17), (17, 39), (39, 40)):
            slices = [SequenceSlice(tokens[begin:end], begin, range(10), SamplingParams())]
            logits = loaded.runner.logits(StepBatch(slices))
        results.append(logits)
    assert 0 < np.linalg.norm(results[1] - results[0]) / np.linalg.norm(results[0]) < 0.02
