"""Sentence encoders: the vectors of transformers' own way, whatever shares the batch, and refusals by name."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModel

from paceline_server.engine.interface import Task
from paceline_server.errors import InvalidConfiguration, ModelUnsupported
from paceline_server.model import encoder_startup
from paceline_server.model.sentence import SentenceModel, is_sentence_model, read_sentence_model
from paceline_server.model.testing import save_tiny_encoder, tiny_config


def load(folder, **groups):
    return encoder_startup.load(tiny_config(folder, **groups), folder, lambda _: None)


def vectors(loaded, texts):
    return np.array([np.frombuffer(vector, "<f4") for vector in loaded.encoder.encode(texts)])


def texts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def by_transformers(folder, text, *, normalize=True):
    """One text alone: the mean of BERT's last hidden states, brought to length 1."""
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    mean = model(input_ids=torch.tensor([text])).last_hidden_state[0].mean(0)
    return (torch.nn.functional.normalize(mean, dim=0) if normalize else mean).numpy()


def test_vectors_are_those_of_transformers(tmp_path):
    folder = save_tiny_encoder(tmp_path)
    loaded = load(folder)
    texts = texts_of([1, 2, 7, 33, 64])
    for vector, text in zip(vectors(loaded, texts), texts, strict=True):
        np.testing.assert_allclose(vector, by_transformers(folder, text), atol=1e-5)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


def test_a_text_has_the_same_vector_in_any_company(tmp_path):
    loaded = load(save_tiny_encoder(tmp_path))
    [text] = texts_of([20])
    alone = vectors(loaded, [text])[0]
    for lengths in ([1], [64, 3], [20] * 7):
        company = texts_of(lengths, seed=1)
        for place in range(len(company) + 1):
            batch = [*company[:place], text, *company[place:]]
            np.testing.assert_allclose(vectors(loaded, batch)[place], alone, atol=1e-5)


def test_a_model_without_the_module_normalize_keeps_the_length_of_its_vectors(tmp_path):
    folder = save_tiny_encoder(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    [text] = texts_of([9])
    np.testing.assert_allclose(
        vectors(load(folder), [text])[0], by_transformers(folder, text, normalize=False), atol=1e-5
    )


def test_the_info_says_what_the_model_is_for_and_how_long_a_text_may_be(tmp_path):
    folder = save_tiny_encoder(tmp_path)
    info = load(folder).info
    assert (info.task, info.dimensions, info.max_model_len) == (Task.EMBED, 48, 64)
    longer = load(folder, engine={"max_model_len": 200}, batching={"max_tokens_in_batch": 200}).info
    assert longer.max_model_len == 200
    with pytest.raises(InvalidConfiguration, match="max_model_len"):
        load(folder, engine={"max_model_len": 513})


def write(path, content):
    path.write_text(json.dumps(content))


def test_the_files_of_later_versions_of_sentence_transformers_are_understood(tmp_path):
    folder = save_tiny_encoder(tmp_path)
    kinds = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
    modules = [
        {"type": f"sentence_transformers.{kind}", "path": path} for kind, path in zip(kinds, ("", "p"), strict=True)
    ]
    (folder / "p").mkdir()
    write(folder / "modules.json", modules)
    write(folder / "p/config.json", {"embedding_dimension": 48, "pooling_mode": "mean", "include_prompt": True})
    write(folder / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    write(folder / "tokenizer_config.json", {"model_max_length": 32})
    assert read_sentence_model(folder) == SentenceModel(normalize=False, max_seq_length=32)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda f: write(f / "1_Pooling/config.json", {"pooling_mode_cls_token": True}), "cls_token"),
        (
            lambda f: write(f / "1_Pooling/config.json", {"pooling_mode_mean_tokens": 1, "pooling_mode_max_tokens": 1}),
            "max_tokens",
        ),
        (lambda f: write(f / "1_Pooling/config.json", {}), "nothing"),
        (lambda f: write(f / "1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}), "mean, cls"),
        (lambda f: write(f / "config_sentence_transformers.json", {"default_prompt_name": "query"}), "default_prompt"),
        (lambda f: write(f / "sentence_bert_config.json", {"do_lower_case": True}), "do_lower_case"),
        (lambda f: (f / "1_Pooling/config.json").unlink(), "cannot be read"),
        (lambda f: write(f / "modules.json", [{"type": "a.Transformer"}, {"type": "a.Dense"}]), "Dense"),
        (lambda f: write(f / "modules.json", {}), "list of modules"),
        (lambda f: write(f / "sentence_bert_config.json", {"max_seq_length": "long"}), "max_seq_length"),
    ],
)
def test_modules_that_would_change_the_vectors_are_refused_by_name(tmp_path, spoil, named):
    folder = save_tiny_encoder(tmp_path)
    spoil(folder)
    with pytest.raises(ModelUnsupported, match=named):
        read_sentence_model(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "xlm-roberta"}, "xlm-roberta"),
        ({"is_decoder": True}, "is_decoder"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
    ],
)
def test_encoders_that_are_not_ours_are_refused_by_name(tmp_path, change, named):
    folder = save_tiny_encoder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | change)
    with pytest.raises(ModelUnsupported, match=named):
        load(folder)


@pytest.mark.parametrize(
    ("engine", "named"), [({"quantization": "int8"}, "quantization"), ({"attention_backend": "cpu"}, "attention")]
)
def test_settings_for_generation_are_refused_by_name(tmp_path, engine, named):
    folder = save_tiny_encoder(tmp_path)
    with pytest.raises(InvalidConfiguration, match=named):
        load(folder, engine=engine)


def test_a_folder_is_a_sentence_model_by_its_list_of_modules(tmp_path):
    assert not is_sentence_model(tmp_path)
    assert is_sentence_model(save_tiny_encoder(tmp_path))
