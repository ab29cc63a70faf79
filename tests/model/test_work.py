"""The work of a forward, from a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.model.load import prepare
from mlxserve.model.work import forward_work

BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]


def matrices(model: nn.Module) -> dict[str, mx.array]:
    """The weights that rows are multiplied with."""
    named = dict(tree_flatten(model.parameters()))
    return {k: v for k, v in named.items() if v.ndim >= 2 and "embed" not in k}


def test_every_matrix_but_the_embedding_counts_once(build_model: BuildModel) -> None:
    model, config = build_model("llama")
    work = forward_work(prepare(model, config, "tiny"))
    assert work.weights == sum(weight.size for weight in matrices(model).values())


def test_attention_costs_two_products_for_each_head_and_position(build_model: BuildModel) -> None:
    model, config = build_model("llama")
    work = forward_work(prepare(model, config, "tiny"))
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = model.model.layers[0].self_attn.q_proj.weight.shape[0] // heads
    assert work.attention == ((layers * heads * 2 * head_dim, None),)


def test_packed_weights_count_as_the_numbers_that_they_hold(build_model: BuildModel) -> None:
    model, config = build_model("llama")
    plain = forward_work(prepare(model, config, "tiny"))
    model, config = build_model("llama")
    nn.quantize(model, group_size=32, bits=4)
    assert forward_work(prepare(model, config, "tiny")) == plain


def test_of_experts_those_count_that_a_row_uses(build_model: BuildModel) -> None:
    model, config = build_model("qwen3_moe")
    assert (config["num_experts"], config["num_experts_per_tok"]) == (4, 2)
    weights = matrices(model)
    experts = sum(weight.size for name, weight in weights.items() if "switch_mlp" in name)
    others = sum(weight.size for name, weight in weights.items() if "switch_mlp" not in name)
    assert forward_work(prepare(model, config, "moe")).weights == others + experts // 2


def test_layers_with_a_window_see_no_more_than_it(build_model: BuildModel) -> None:
    work = forward_work(prepare(*build_model("gpt_oss", sliding_window=24), "tiny"))
    assert {window for _, window in work.attention} == {24, None}
    assert work.of_row(5000) - work.of_row(4999) < work.of_row(1) - work.of_row(0)
