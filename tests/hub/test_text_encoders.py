"""What a folder's files say about vectors is read, or refused by a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.files import ModelFiles
from mlxserve.hub.text_encoders import TextEncoder, TokenPooling, is_text_encoder, text_encoder

BERT = {"model_type": "bert", "max_position_embeddings": 512, "architectures": ["BertModel"]}


def files(folder: Path, **config: Any) -> ModelFiles:
    return ModelFiles("org/model", folder, {**BERT, **config})


def found(folder: Path, **config: Any) -> TextEncoder:
    encoder = text_encoder(files(folder, **config))
    assert encoder is not None
    return encoder


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def modules(folder: Path, *kinds: str) -> None:
    paths = ["", *(f"{n}_{kind}" for n, kind in enumerate(kinds[1:], 1))]
    listed = [
        {"idx": n, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write(folder, "modules.json", listed[::-1])


def test_all_files_of_sentence_transformers_are_read(tmp_path: Path) -> None:
    modules(tmp_path, "Transformer", "Pooling", "Normalize")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 128})
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    write(tmp_path, "config_sentence_transformers.json", prompts)
    encoder = found(tmp_path)
    assert encoder.poolings == (TokenPooling.CLS,)
    assert (encoder.normalizes, encoder.max_length, encoder.says_pooling) == (True, 128, True)
    assert (encoder.prompts, encoder.default_prompt) == ({"query": "query: "}, "query")


def test_a_folder_that_says_nothing_pools_by_the_mean(tmp_path: Path) -> None:
    encoder = found(tmp_path)
    assert encoder.poolings == (TokenPooling.MEAN,)
    assert (encoder.normalizes, encoder.max_length, encoder.says_pooling) == (True, 512, False)


def test_vectors_are_not_scaled_where_the_list_has_no_such_module(tmp_path: Path) -> None:
    modules(tmp_path, "Transformer", "Pooling")
    assert not found(tmp_path).normalizes


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 512),
        ({"model_type": "xlm-roberta", "pad_token_id": 1, "max_position_embeddings": 514}, 512),
        ({"model_type": "modernbert", "max_position_embeddings": 8192}, 512),  # the tokenizer's
    ],
)
def test_the_longest_text_is_the_least_that_the_files_say(
    tmp_path: Path, config: dict[str, Any], length: int
) -> None:
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 512})
    assert found(tmp_path, **config).max_length == length


def test_a_length_that_means_none_is_none(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"model_max_length": int(1e30)})
    assert found(tmp_path).max_length == 512


def test_which_models_are_encoders(tmp_path: Path) -> None:
    qwen = ModelFiles("org/Qwen3-4B", tmp_path, {"model_type": "qwen3"})
    assert text_encoder(qwen) is None
    named = ModelFiles("org/Qwen3-Embedding-0.6B", tmp_path, {"model_type": "qwen3"})
    encoder = text_encoder(named)
    assert encoder is not None
    assert encoder.poolings == (TokenPooling.LAST,)
    gemma = {"model_type": "gemma3_text", "use_bidirectional_attention": True}
    encoder = text_encoder(ModelFiles("org/gemma", tmp_path, gemma))
    assert encoder is not None
    assert encoder.poolings == (TokenPooling.MEAN,)
    marked = {**BERT, "architectures": ["BertForTokenClassification"]}
    assert text_encoder(ModelFiles("org/ner", tmp_path, marked)) is None
    modules(tmp_path, "Transformer", "Pooling")
    assert text_encoder(qwen) is not None


def test_rerankers_have_one_label(tmp_path: Path) -> None:
    heads = {"architectures": ["BertForSequenceClassification"]}
    assert found(tmp_path, **heads, id2label={"0": "LABEL_0"}).is_reranker
    for labels in ({}, {"id2label": {"0": "no", "1": "yes"}}, {"num_labels": 3}):
        with pytest.raises(UnsupportedModel, match=r"a classifier with [23] labels"):
            text_encoder(files(tmp_path, **heads, **labels))
        assert is_text_encoder(files(tmp_path, **heads, **labels))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("1_Pooling/config.json", {"include_prompt": False}, "without the tokens of the prompt"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, r"the pooling \['attention'\]"),
        ("2_Dense/config.json", {"in_features": 3}, "must give in_features and out_features"),
        (
            "2_Dense/config.json",
            {"in_features": 3, "out_features": 3, "activation_function": "a.Swish"},
            "has the activation 'swish'",
        ),
        ("modules.json", [{"idx": 0, "path": "../x", "type": "a.Pooling"}], "is outside of"),
        ("modules.json", {"idx": 0}, "modules.json cannot be read"),
        ("modules.json", [{"idx": 0, "path": "", "type": "a.LSTM"}], "a module 'LSTM'"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, name: str, content: object, message: str
) -> None:
    modules(tmp_path, "Transformer", "Pooling", "Dense")
    write(tmp_path, name, content)
    with pytest.raises(UnsupportedModel, match=message):
        text_encoder(files(tmp_path))
