"""GGUF files become folders that the server loads: whole or not at all, and with the tokenizer they were made for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors import safe_open
from tokenizers import Tokenizer, pre_tokenizers

from paceline_server.convert import convert_gguf, main
from paceline_server.errors import InvalidConfiguration, ModelNotFound, ModelUnsupported
from paceline_server.model.startup import load
from paceline_server.model.testing import tiny_config

HIDDEN, HEADS, LAYERS, INNER = 32, 4, 2, 48
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path, split: str) -> Path:
    """A llama of random weights whose vocabulary is the bytes and two merges of spaces."""
    space = "Ġ"
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), space * 2]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges([f"{space} {space}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {block + name: (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {block + f"attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
        shapes |= {block + "ffn_gate": (INNER, HIDDEN), block + "ffn_up": (INNER, HIDDEN)}
        shapes |= {block + "ffn_down": (HIDDEN, INNER)}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_file_is_a_model_that_loads(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "model"
    convert_gguf(write_gguf(tmp_path / "m.gguf", "gpt-2"), folder)
    assert load(tiny_config(folder), lambda _: None).info.max_model_len == 64
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118 (an open file of tensors is no mapping)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in folder.iterdir())
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "something was left behind"


@pytest.mark.parametrize(("split", "pieces"), [("gpt-2", ["a", "Ġ", "Ġ", "5"]), ("smollm", ["a", "ĠĠ", "5"])])
def test_the_tokenizer_splits_digits_as_the_file_says(tmp_path: Path, split: str, pieces: list[str]) -> None:
    convert_gguf(write_gguf(tmp_path / "m.gguf", split), tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("a  5").tokens == pieces


def test_a_tokenizer_that_is_not_known_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", "of-my-own")
    with pytest.raises(ModelUnsupported, match="of-my-own"):
        convert_gguf(source, tmp_path / "store" / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("")
    with pytest.raises(InvalidConfiguration, match="not empty"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", "gpt-2"), tmp_path / "model")


@pytest.mark.parametrize("content", [None, b"", b"not a model at all"])
def test_what_is_no_gguf_file_is_said_to_be_none(tmp_path: Path, content: bytes | None) -> None:
    source = tmp_path / "m.gguf"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(ModelNotFound, match=r"m\.gguf"):
        convert_gguf(source, tmp_path / "model")


def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.gguf"), str(tmp_path / "model")]) == 1
    assert "ModelNotFound: there is no file" in capsys.readouterr().err
