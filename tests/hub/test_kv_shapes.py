"""What is read off a config.json is what the model keeps, for every architecture."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from mlxserve.cache.groups import window_of
from mlxserve.hub.files import text_config
from mlxserve.hub.kv_shapes import KVShape, kv_shape, num_layers
from mlxserve.model.load import LoadedModel, prepare
from tests.model.test_every_architecture import ARCHITECTURES

DIFFERENT = {
    "dbrx": "its heads of keys are in an inner table: all heads are counted",
    "gpt_neox": "has as many heads of keys as of queries, whatever its config says",
    "helium": "takes its head size from its hidden size",
    "iquestloopcoder": "goes through its layers twice",
    "longcat_flash": "has two attentions in a layer",
    "longcat_flash_ngram": "has two attentions in a layer",
    "minimax_m3_vl": "the small configuration mixes those of several models",
    "nemotron-nas": "every block has a config of its own: all heads are counted",
    "plamo": "shares keys between heads by a number of its own: all heads are counted",
    "plamo2": "its attention is in every second layer: all are counted",
    "recurrent_gemma": "has one head of keys, whatever its config says",
}
# Their small configurations leave to mlx-lm's defaults what the published ones say.
SILENT = ("deepseek_v32", "openelm", "phixtral", "youtu_llm")

# The window of its published configuration, which is the default of mlx-lm as well.
WINDOWS = {"afmoe": 2048}

EXPANDED = ("deepseek_v2", "minicpm3")  # latent attention whose cache has the keys of all heads


def written(name: str, model: Any, layers: Any) -> dict[str, Any]:
    """The part about text, without the keys that this model does not read."""
    config = dict(text_config(ARCHITECTURES[name]["config"]))
    arguments = inspect.signature(model).parameters
    if "text_config" not in arguments:
        config = {key: value for key, value in config.items() if key in arguments}
    sizes = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if name not in EXPANDED and all((x.key_dim, x.value_dim) != sizes for x in layers):
        config.pop("kv_lora_rank", None)
    return config


def windows_of(loaded: LoadedModel) -> tuple[int, int, int]:
    """(positions, values, rows) of the layers that have pages of their own."""
    size = window_of([layer.window for layer in loaded.layers])
    if size is None or loaded.states:
        return 0, 0, 0
    layers = [layer for layer in loaded.layers if layer.window is not None]
    values = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return size, values, sum(2 * layer.kv_heads for layer in layers)


@pytest.mark.slow
def test_the_shape_is_what_the_model_keeps() -> None:
    for name in sorted(set(ARCHITECTURES) - {*DIFFERENT, *SILENT}):
        module = importlib.import_module(f"mlx_lm.models.{name.split('.')[0]}")
        config = ARCHITECTURES[name]["config"]
        model = module.Model(module.ModelArgs.from_dict(config))
        loaded = prepare(model, {**config, "max_position_embeddings": 512}, name)
        kept = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in loaded.layers)
        rows = sum(0 if layer.is_latent else 2 * layer.kv_heads for layer in loaded.layers)
        text = written(name, module.ModelArgs, loaded.layers)
        if name in WINDOWS:
            text["sliding_window"] = WINDOWS[name]
        shape = KVShape(kept, bool(loaded.states), rows, *windows_of(loaded))
        assert kv_shape(text) == shape, name


@pytest.mark.parametrize(
    ("config", "count"),
    [({"num_hidden_layers": 3}, 3), ({"n_layer": 5}, 5), ({}, None), ({"n_layers": "many"}, None)],
)
def test_the_number_of_layers_is_known_where_the_config_says_it(
    config: dict[str, Any], count: int | None
) -> None:
    assert num_layers(config) == count
