"""Published config.json files: each is loaded, with the context and ends it says, or refused by a sentence.

`published.json` has their fields as published, with small dimensions. A vocabulary that the published file
leaves to its class is named at its top.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.catalog import Origin, entry_of
from mlxserve.hub.definition_config import changes_for_definition
from mlxserve.hub.embedded import model_path
from mlxserve.hub.files import ModelFiles, find_model
from mlxserve.hub.generation_config import read_generation_config
from mlxserve.model import definitions, refusals
from mlxserve.model.attention import load_probed
from mlxserve.model.load import read_model
from mlxserve.text.tokenizer_files import load_tokenizer

PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())
SERVED = sorted(name for name, row in PUBLISHED.items() if "refused" not in row)
REFUSED = sorted(PUBLISHED.keys() - SERVED)


def written(folder: Path, name: str, weights: dict[str, mx.array]) -> ModelFiles:
    row = PUBLISHED[name]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / file, folder)
    (folder / "config.json").write_text(json.dumps(row["config"]))
    if "generation" in row:
        (folder / "generation_config.json").write_text(json.dumps(row["generation"]))
    if row["config"].get("auto_map"):
        (folder / "modeling_own.py").write_text("raise SystemExit")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return find_model(str(folder))


def random_weights(config: dict[str, Any]) -> dict[str, mx.array]:
    """bfloat16 weights of the model that mlx-lm's definition makes of the config."""
    whole = {**json.loads(json.dumps(config)), **changes_for_definition(config)}
    model_class, args_class = _get_classes(whole)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(whole))

    def drawn(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        noise = mx.random.normal(array.shape)
        noise = noise * 0.3 + 1.0 if array.ndim <= 1 else noise * array.shape[-1] ** -0.5
        return noise.astype(mx.bfloat16)

    return dict(tree_flatten(tree_map(drawn, model.parameters())))


@pytest.mark.parametrize("name", SERVED)
def test_its_context_and_what_ends_an_answer(name: str, tmp_path: Path) -> None:
    row = PUBLISHED[name]
    files = written(tmp_path, name, {"any": mx.zeros(1)})
    assert list(read_generation_config(files).eos_token_ids) == row["eos"]
    entry = entry_of(name, Origin.FOLDER, tmp_path)
    assert entry is not None, "it is listed"
    assert entry.context == row["context"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_it_is_loaded_and_probed(name: str, tmp_path: Path) -> None:
    row = PUBLISHED[name]
    files = written(tmp_path, name, random_weights(row["config"]))
    choice = load_probed(
        files,
        is_metal=False,
        memory_limit=1 << 30,
        kv_cache_dtype="auto",
        attention_backend="auto",
    )
    loaded = choice.loaded
    assert loaded.context.length == row["context"]
    assert loaded.by_sequence == (row.get("served") == "by sequence")
    assert loaded.dtype == mx.float32
    assert most_common_dtype(files) == mx.bfloat16
    entry = entry_of(name, Origin.FOLDER, tmp_path)
    assert entry is not None
    kept = sum(spec.kv_heads * (spec.key_dim + spec.value_dim) for spec in loaded.layers)
    assert (entry.kv.num_values, entry.kv.has_states) == (kept, loaded.has_states)
    assert load_tokenizer(files.path, ()).encode("a text")


def most_common_dtype(files: ModelFiles) -> mx.Dtype:
    """Of the parameters as a Mac loads them, which are not read for this."""
    model, _ = read_model(files, is_metal=True)
    return Counter(array.dtype for _, array in tree_flatten(model.parameters())).most_common(1)[0][
        0
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without mlx-vlm, which defines some of them: docs/models.md is computed with both."""
    for module in (definitions, refusals):
        monkeypatch.setattr(module, "is_installed", lambda: False)
    files = written(tmp_path, name, {"any": mx.zeros(1)})
    with pytest.raises(UnsupportedModel) as caught:
        load_probed(
            files,
            is_metal=False,
            memory_limit=1 << 30,
            kv_cache_dtype="auto",
            attention_backend="auto",
        )
    assert PUBLISHED[name]["refused"] in str(caught.value)
