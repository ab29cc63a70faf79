"""Small random encoders in folders as sentence-transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from mlxserve.model.definitions import defer_mlx_vlm

WORDS = [
    "weather",
    "sun",
    "stadium",
    "drove",
    "lovely",
    "today",
    "the",
    "a",
    "is",
    "to",
    "he",
    "it",
]
SPECIAL = {"bert": ("[PAD]", "[CLS]", "[SEP]", "[UNK]"), "other": ("<s>", "<pad>", "</s>", "<unk>")}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "vocab_size": 120,
}
MEAN = {"pooling_mode_mean_tokens": True}


def write_tokenizer(folder: Path, *, is_bert: bool) -> None:
    """One of words, which puts marks around a text as the kind does."""
    padding, first, last, unknown = SPECIAL["bert"]
    if not is_bert:
        first, padding, last, unknown = SPECIAL["other"]
        marks = [first, padding, last, unknown]
    else:
        marks = [padding, first, last, unknown]
    vocabulary = {word: number for number, word in enumerate([*marks, *WORDS])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    fast.normalizer = normalizers.Lowercase()
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    ids = [(mark, vocabulary[mark]) for mark in (first, last)]
    between = [f"{last}:1"] if is_bert else [last, last]
    pair = (
        f"{first} $A {last} $B:1 {last}:1"
        if is_bert
        else f"{first} $A {' '.join(between)} $B {last}"
    )
    fast.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=pair, special_tokens=ids
    )
    fast.add_special_tokens(marks)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "pad_token": padding,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_modules(folder: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> None:
    """modules.json with these modules after the transformer, and how it pools."""
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, kind in enumerate(kinds, 1):
        path = f"{number}_{kind}"
        (folder / path).mkdir(exist_ok=True)
        modules.append(
            {"idx": number, "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        if kind == "Pooling":
            (folder / path / "config.json").write_text(json.dumps(pooling or MEAN))
    (folder / "modules.json").write_text(json.dumps(modules))


def write_encoder(folder: Path, kind: str = "bert", **config: Any) -> dict[str, mx.array]:
    """A random encoder of one of mlx-vlm's kinds in a folder; its weights."""
    import importlib

    defer_mlx_vlm()
    definition = "xlm_roberta" if kind == "xlm-roberta" else kind
    module = importlib.import_module(f"mlx_vlm.models.{definition}")
    written = {"model_type": kind, **SIZES, "pad_token_id": int(kind != "bert"), **config}
    is_classifier = "ForSequenceClassification" in str(config.get("architectures"))
    build = module.SequenceClassificationModel if is_classifier else module.Model
    mx.random.seed(7)
    model = build(module.ModelConfig.from_dict(written))
    model.update(tree_map(lambda a: mx.random.normal(a.shape) * 0.3, model.parameters()))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(written))
    write_tokenizer(folder, is_bert=kind == "bert")
    return weights


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with mean pooling and vectors of length one."""
    folder = tmp_path_factory.mktemp("small-bert")
    write_encoder(folder)
    write_modules(folder, "Pooling", "Normalize")
    return folder


@pytest.fixture(scope="session")
def reranker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with a head for one label."""
    folder = tmp_path_factory.mktemp("small-reranker")
    write_encoder(
        folder, architectures=["BertForSequenceClassification"], id2label={"0": "LABEL_0"}
    )
    return folder


@pytest.fixture
def encoder_folder(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes an encoder into a folder of its own."""

    def write(kind: str = "bert", **config: Any) -> Path:
        folder = tmp_path / "encoder"
        folder.mkdir()
        write_encoder(folder, kind, **config)
        return folder

    return write
