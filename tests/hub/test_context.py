"""The context that a config.json stands for, by the fields of published files."""

from __future__ import annotations

from typing import Any

import pytest

from mlxserve.hub.class_defaults import with_class_defaults
from mlxserve.hub.context import Context, context_of

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("text", "length", "longest"),
    [
        ({"max_position_embeddings": 40960}, 40960, 40960),
        ({"max_position_embeddings": 131072.0}, 131072, 131072),
        ({"n_positions": 1024, "n_ctx": 1024}, 1024, 1024),
        ({"model_max_length": 1048576}, 1048576, 1048576),
        ({"max_sequence_length": 2048}, 2048, 2048),
        ({"seq_length": 8192, "max_position_embeddings": 32768}, 32768, 32768),
        # YaRN over the length before it (Qwen 2.5), after it (gpt-oss, DeepSeek), or without either
        (
            {"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", **YARN}},
            131072,
            131072,
        ),
        (
            {"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", **YARN}},
            131072,
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                },
            },
            163840,
            163840,
        ),
        (
            {"max_position_embeddings": 8192, "rope_scaling": {"type": "yarn", "factor": 2}},
            16384,
            16384,
        ),
        (
            {"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "yarn", **YARN}},
            131072,
            131072,
        ),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            65536,
            65536,
        ),
        # linear and dynamic: the length may count them already
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}},
            4096,
            16384,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2}},
            4096,
            8192,
        ),
        # counted in the length
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
            131072,
            131072,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": "4"}},
            4096,
            4096,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096, 4096),
    ],
)
def test_the_context_and_how_far_the_scaling_reaches(
    text: dict[str, Any], length: int, longest: int
) -> None:
    assert context_of(text) == Context(length, longest)


def test_a_scaling_that_cannot_be_is_none() -> None:
    for factor in [float("nan"), float("inf"), -4, 0, True, "4", None, [4]]:
        for kind in ["yarn", "linear", 3, ["yarn"], None]:
            text = {
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": kind, "factor": factor},
            }
            assert context_of(text) == Context(4096, 4096), (factor, kind)


@pytest.mark.parametrize("text", [{}, {"max_position_embeddings": None}, {"n_ctx": True}])
def test_a_config_may_name_no_context(text: dict[str, Any]) -> None:
    assert context_of(text) is None


def test_what_a_published_file_leaves_out_is_its_class_default() -> None:
    """Of Gemma 3 4B, whose `text_config` names neither heads nor a context."""
    published = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    text = with_class_defaults(published)
    assert context_of(text) == Context(131072, 131072)
    assert (text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]) == (
        8,
        4,
        256,
    )
    assert text["hidden_size"] == 2560


def test_what_a_file_says_goes_before_its_class() -> None:
    said = {"model_type": "gemma3_text", "num_attention_heads": 16, "max_position_embeddings": None}
    assert with_class_defaults(said)["num_attention_heads"] == 16
    complete = {"model_type": "gemma3_text", "num_attention_heads": 16, "n_ctx": 5}
    assert with_class_defaults(complete) is complete
    assert with_class_defaults({"model_type": "no_such"}) == {"model_type": "no_such"}
