"""An unmodified model attends over pages; its dense path is unchanged; only selected rows get
logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels.choice import select_backend
from mlxserve.core.errors import UnsupportedModel
from mlxserve.model.load import prepare
from mlxserve.model.paged import RowSelector, select_rows, use_paged_attention
from mlxserve.model.probe import probe

BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]
Difference = Callable[..., float]
IDS = mx.array([[5, 3, 8, 1, 13]])


def test_windows_shorter_and_longer_than_the_prompt_equal_the_dense_ones(
    build_model: BuildModel, difference: Difference
) -> None:
    for window in [5, 24, 47, 48, 300]:
        for kind in ["gemma3_text", "gpt_oss"]:
            loaded = prepare(*build_model(kind, sliding_window=window), kind)
            assert difference(loaded, [0, 16, 32, 33, 40, 47, 48]) < 1e-4, (window, kind)


def test_a_prompt_may_be_computed_in_any_chunks(
    build_model: BuildModel, difference: Difference
) -> None:
    loaded = prepare(*build_model("qwen3"), "tiny")
    for cuts in ([0, 40], [0, 1, 2, 3, 40], [0, 15, 16, 17, 40], [0, 16, 32, 40], [0, 39, 40]):
        assert difference(loaded, cuts) < 1e-4


def test_replacing_attention_twice_replaces_it_once(build_model: BuildModel) -> None:
    model, _ = build_model("llama")
    use_paged_attention(model)
    once = vars(llama)["scaled_dot_product_attention"]
    use_paged_attention(model)
    assert vars(llama)["scaled_dot_product_attention"] is once


def test_the_dense_path_is_unchanged(build_model: BuildModel) -> None:
    model, _ = build_model("llama")
    base = importlib.import_module("mlx_lm.models.base").scaled_dot_product_attention
    vars(llama)["scaled_dot_product_attention"] = base
    expected = np.array(model(IDS, cache=make_prompt_cache(model)))
    use_paged_attention(model)
    assert vars(llama)["scaled_dot_product_attention"] is not base
    assert np.array_equal(np.array(model(IDS, cache=make_prompt_cache(model))), expected)


class Inherited(qwen3.Attention):  # type: ignore[misc]
    """A layer class in this module, which imports no attention function."""


def test_attention_inherited_from_another_module_is_replaced_there(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = importlib.import_module("mlx_lm.models.base").scaled_dot_product_attention
    monkeypatch.setattr(qwen3, "scaled_dot_product_attention", base)
    donor, config = build_model("qwen3")
    layer = donor.model.layers[0].self_attn
    layer.__class__ = Inherited
    use_paged_attention(layer)
    assert vars(qwen3)["scaled_dot_product_attention"] is not base
    assert probe(prepare(donor, config, "tiny"), select_backend("cpu")) < 1e-4


def test_an_unsupported_attention_option_is_refused_by_name(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxserve.probe")
    model, config = build_model("llama")
    loaded = prepare(model, config, "tiny")
    paged = vars(llama)["scaled_dot_product_attention"]

    def with_option(*arguments: Any, cache: Any, **options: Any) -> mx.array:
        extra = {} if type(cache).__name__ == "KVCache" else {"dropout": 0.1}
        output: mx.array = paged(*arguments, cache=cache, **options, **extra)
        return output

    monkeypatch.setattr(llama, "scaled_dot_product_attention", with_option)
    with pytest.raises(UnsupportedModel, match="cannot be computed over pages"):
        probe(loaded, select_backend("cpu"))
    assert "attention with dropout" in caplog.text


# ---- rows that become logits


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
def test_logits_of_selected_rows_equal_those_of_a_full_forward(
    kind: str, is_tied: bool, build_model: BuildModel
) -> None:
    model, _ = build_model(kind, tie_word_embeddings=is_tied)
    tokens = IDS.swapaxes(0, 1)
    every = np.array(model(tokens))
    selector = RowSelector()
    select_rows(model, selector)
    assert np.array_equal(np.array(model(tokens)), every)
    with selector.choosing(mx.array([4, 0]), len(tokens)):
        assert np.allclose(np.array(model(tokens)), every[[4, 0]], atol=1e-5)


def test_a_head_that_is_called_for_pieces_of_the_rows_computes_all(
    build_model: BuildModel,
) -> None:
    model, _ = build_model("llama", tie_word_embeddings=False)
    tokens = IDS.swapaxes(0, 1)
    every = np.array(model(tokens))
    selector = RowSelector()
    select_rows(model, selector)
    whole = model.lm_head

    class Rowwise(nn.Module):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            return mx.concatenate([whole(x[row : row + 1]) for row in range(len(x))])

    model.lm_head = Rowwise()
    with selector.choosing(mx.array([4, 0]), len(tokens)):
        assert np.allclose(np.array(model(tokens)), every, atol=1e-5)


def test_only_the_selected_rows_reach_the_head(build_model: BuildModel) -> None:
    seen = []

    class Counting(nn.Linear):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            seen.append(x.shape[0])
            logits: mx.array = super().__call__(x)
            return logits

    model, _ = build_model("llama", tie_word_embeddings=False)
    model.lm_head.__class__ = Counting
    selector = RowSelector()
    select_rows(model, selector)
    with selector.choosing(mx.array([2, 3]), IDS.shape[1]):
        model(IDS.swapaxes(0, 1))
    assert seen == [2]
