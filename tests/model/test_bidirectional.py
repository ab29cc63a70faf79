"""Which models' rows of an image attend in both directions, in which layers, and what each row sees."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.model.bidirectional import Bidirectional, MaskedCache

BLOCKS = ((2, 5), (6, 8))
# Rows of a prompt of nine tokens, and what each sees.
CAUSAL = ["1", "11", "111", "1111", "11111", "111111", "1111111", "11111111", "111111111"]
BOTH_WAYS = [*CAUSAL[:2], *["11111"] * 3, "111111", *["11111111"] * 2, "111111111"]


def seen(mask: np.ndarray) -> list[str]:
    return ["".join(map(str, row.astype(int))).rstrip("0") for row in mask]


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_gemma_4_says_whether_its_layers_with_a_window_do(kind: str) -> None:
    for value, expected in (
        ("vision", Bidirectional.WINDOW_LAYERS),
        (None, None),
        ("all", None),
    ):
        text = {"use_bidirectional_attention": value}
        assert Bidirectional.from_config({"model_type": kind, "text_config": text}) is expected


def test_where_the_configuration_is_silent_the_kind_decides() -> None:
    """As in transformers' classes of configurations."""
    for kind, expected in (("gemma4", None), ("gemma4_unified", Bidirectional.WINDOW_LAYERS)):
        assert Bidirectional.from_config({"model_type": kind, "text_config": {}}) is expected


def test_gemma_3_does_in_all_layers_and_others_in_none() -> None:
    text: dict[str, Any] = {"text_config": {"use_bidirectional_attention": False}}
    assert Bidirectional.from_config({"model_type": "gemma3", **text}) is Bidirectional.ALL_LAYERS
    for kind in ("gemma3n", "qwen3_vl", "mistral3"):
        assert Bidirectional.from_config({"model_type": kind, **text}) is None


def test_another_model_that_asks_for_it_is_refused() -> None:
    text = {"use_bidirectional_attention": "vision"}
    with pytest.raises(ValueError, match="in which layers is not known for 'gemma5'"):
        Bidirectional.from_config({"model_type": "gemma5", "text_config": text})


def test_rows_of_an_image_see_all_of_it_and_others_look_back() -> None:
    everywhere, in_windows = Bidirectional.ALL_LAYERS, Bidirectional.WINDOW_LAYERS
    assert seen(everywhere.mask(9, BLOCKS, None)) == BOTH_WAYS
    assert seen(in_windows.mask(9, BLOCKS, None)) == CAUSAL
    assert seen(in_windows.mask(9, BLOCKS, 100)) == BOTH_WAYS


def test_a_window_hides_what_is_far_before_a_row_and_nothing_after_it() -> None:
    for layers in Bidirectional:
        assert seen(layers.mask(9, BLOCKS, 2)) == [
            *("1", "11", "01111", "00111", "00011"),
            *("000011", "00000111", "00000011", "000000011"),
        ]


def test_a_cache_gives_the_layers_of_a_definition_these_masks() -> None:
    cache = MaskedCache(Bidirectional.WINDOW_LAYERS, BLOCKS)
    for window in (None, 2):
        mask = cache.make_mask(9, return_array=True, window_size=window)
        assert seen(np.array(mask)) == seen(Bidirectional.WINDOW_LAYERS.mask(9, BLOCKS, window))
    rows = mx.zeros((1, 1, 9, 4))
    cache.update_and_fetch(rows, rows)
    with pytest.raises(AssertionError, match="a prompt at once"):
        cache.make_mask(1)
