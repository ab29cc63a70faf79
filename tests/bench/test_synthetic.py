"""Synthetic models: ordinary folders whose tokens are words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.bench import synthetic
from mlxserve.core.errors import ModelNotFound
from mlxserve.text.tokenizer import Tokenizer

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small geometries, and nothing written before."""
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    llama, counting = (synthetic.GEOMETRIES[f"{kind}-100m"] for kind in ("llama", "counting"))
    monkeypatch.setitem(synthetic.GEOMETRIES, "tiny", {**llama, **TINY})
    wide = {"hidden_size": 256}  # so that no two embeddings are alike
    monkeypatch.setitem(synthetic.GEOMETRIES, "counting-tiny", {**counting, **TINY, **wide})


@pytest.fixture
def folder() -> Path:
    return synthetic.synthetic_model("synthetic:tiny")


def test_words_and_tokens_map_to_each_other(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("w3 w57 w0") == [3, 57, 0]
    assert tokenizer.decode([3, 57, 0]) == "w3 w57 w0"
    assert tokenizer.vocab_size == 64
    assert tokenizer.eos_token_ids == {63}


def test_every_token_is_visible_in_the_text(folder: Path) -> None:
    decoder = Tokenizer(folder).stream()
    pieces = [decoder.push([token]) for token in (3, 57, 4)]
    assert "".join(pieces) == "w3 w57 w4"
    assert all(pieces)


def test_a_conversation_is_rendered_with_its_roles(folder: Path) -> None:
    ids = Tokenizer(folder).render([{"role": "user", "content": "w5 w6"}])
    assert ids == [62, 59, 5, 6, 63, 62, 60]


def test_it_is_written_once(folder: Path) -> None:
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert synthetic.synthetic_model("tiny") == folder
    assert weights.stat().st_mtime_ns == written
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 63


def test_a_model_that_counts_counts() -> None:
    with LLM(str(synthetic.synthetic_model("counting-tiny")), num_pages=8) as llm:
        params = SamplingParams(max_tokens=6, temperature=0)
        assert llm.generate("w9 w3 w9 w20", params)[0].text == "w21 w22 w23 w24 w25 w26"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match="synthetic:llama-100m"):
        synthetic.synthetic_model("synthetic:gpt-5")
