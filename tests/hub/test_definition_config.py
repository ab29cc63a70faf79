"""What a definition of mlx-lm is told that a published config.json says in another place."""

from __future__ import annotations

from mlxserve.hub.definition_config import changes_for_definition


def test_an_ordinary_config_is_left_alone() -> None:
    config = {"model_type": "llama", "rope_theta": 5e5, "tie_word_embeddings": True}
    assert changes_for_definition(config) == {}


def test_code_that_a_config_names_is_left_out() -> None:
    assert changes_for_definition({"model_file": "model.py"}) == {"model_file": None}


def test_the_text_model_gets_what_is_only_at_the_top() -> None:
    config = {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "vocab_size": 1,
        "quantization": {"bits": 4},
        "vision_config": {"depth": 27},
        "text_config": {"model_type": "qwen3_vl_text", "vocab_size": 2, "rope_theta": None},
        "rope_theta": 5e6,
    }
    assert changes_for_definition(config)["text_config"] == {
        "model_type": "qwen3_vl_text",
        "vocab_size": 2,
        "tie_word_embeddings": True,
        "rope_theta": 5e6,
    }


def test_rope_parameters_are_also_said_in_the_old_words() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "partial_rotary_factor": 0.5}
    assert changes_for_definition({"rope_parameters": yarn}) == {
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {**yarn, "type": "yarn"},
    }
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert changes_for_definition({"rope_parameters": plain, "rope_theta": 5.0}) == {}
    text = {"text_config": {"rope_parameters": plain}}
    assert changes_for_definition(text)["text_config"]["rope_theta"] == 1e6


def test_rope_parameters_by_the_kind_of_a_layer_are_told_apart() -> None:
    by_kind = {
        "full_attention": {
            "rope_type": "linear",
            "factor": 8.0,
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    found = changes_for_definition({"rope_parameters": by_kind})
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, 1e4)
    assert found["rope_scaling"]["type"] == "linear"
    assert "partial_rotary_factor" not in found, "it may be that of the other layers"
