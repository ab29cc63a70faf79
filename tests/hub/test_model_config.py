"""Numbers in a config.json that no model can have."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.model_config import MAX_LAYERS, check_model_config


def test_an_absurd_number_is_refused_with_the_range() -> None:
    for config, message in [
        ({"num_hidden_layers": 1_000_000}, f"a whole number from 1 to {MAX_LAYERS}, got 1000000."),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be a whole number from 1"),
        ({"num_hidden_layers": -1}, "got -1."),
        ({"num_hidden_layers": 7.5}, "got 7.5."),
        ({"num_hidden_layers": True}, "got True."),
        ({"n_layer": "4"}, "got '4'."),
        ({"hidden_size": 10**20}, "hidden_size must be a whole number from 1 to 16777216"),
        ({"vocab_size": 10**12}, "vocab_size must be"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"intermediate_size": 2**31}, "intermediate_size must be"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings must be"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number, got 'x'."),
        ({"rope_theta": 10**400}, "rope_theta must be a number"),
        ({"text_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers must be"),
    ]:
        with pytest.raises(UnsupportedModel) as caught:
            check_model_config(config, "m")
        assert str(caught.value).startswith("m: config.json's "), config
        assert message in str(caught.value), config
        assert len(str(caught.value)) < 250, config


def test_what_published_models_have_is_accepted() -> None:
    for config in [
        {"num_hidden_layers": 126, "hidden_size": 16_384, "vocab_size": 262_144},
        {"max_position_embeddings": 10_485_760, "rope_theta": 1_000_000, "rms_norm_eps": 1e-6},
        {"intermediate_size": [512, 1_024], "num_key_value_heads": None, "num_experts": 0},
        {"num_hidden_layers": 4.0, "text_config": {"n_routed_experts": 384}, "head_dim": 256},
        {"text_config": "none"},
        {},
    ]:
        check_model_config(config, "m")


def test_a_million_layers_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    from mlxserve.hub.embedded import model_path
    from mlxserve.hub.files import find_model

    folder = tmp_path
    for file in model_path().iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 1000000')
    )
    begun = time.thread_time()
    with pytest.raises(UnsupportedModel, match="num_hidden_layers must be"):
        find_model(str(folder))
    assert time.thread_time() - begun < 5
