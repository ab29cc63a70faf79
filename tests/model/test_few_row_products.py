"""A model's products of a few rows are replaced where the trial says so, and stay the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels.few_rows import PACKS, FewRows, Quantised, one_by_one
from metal_kernels.metal import MetalBackend
from metal_kernels.reading import read
from mlxserve.model import few_row_products
from mlxserve.model.few_row_products import FewRowEmbedding, FewRowLinear, use_few_rows
from mlxserve.model.fused_layers import FusedLayers, joined_products
from mlxserve.model.load import LoadedModel, prepare
from tests.emulated import emulated_backend

BuildModel = Callable[..., tuple[Any, dict[str, Any]]]
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}


class Counting(FewRows):
    """Multiplies a row at a time by mlx, and counts."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # rows, results

    def product(self, rows: mx.array, weights: Quantised, packs: int) -> mx.array:
        flat = rows.reshape(-1, rows.shape[-1])
        assert packs in PACKS
        if rows.ndim > 2:  # not of the trial
            self.calls.append((len(flat), len(weights.weights)))
        return one_by_one(flat, weights).reshape(*rows.shape[:-1], -1)


def quantised_model(
    build_model: BuildModel, kind: str = "qwen2", bits: int = 4, **changes: Any
) -> LoadedModel:
    model, config = build_model(kind, **{**SIZES, **changes})
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=bits)
    return prepare(model, config, "quantised")


def counting_backend() -> tuple[MetalBackend, Counting]:
    backend = emulated_backend()
    backend.few_rows = counting = Counting()
    return backend, counting


def always_faster() -> Callable[[Callable[[], None]], float]:
    times = iter(range(1_000_000))
    return lambda _run: next(times)


def logits(loaded: LoadedModel, num_rows: int) -> mx.array:
    tokens = mx.array([[3], [1], [4], [1], [5], [9]][:num_rows])
    found: mx.array = loaded.model(tokens)
    mx.eval(found)
    return found


@pytest.mark.parametrize(("is_fused", "is_tied"), [(False, False), (True, True)])
def test_every_product_of_a_few_rows_is_replaced(
    is_fused: bool, is_tied: bool, build_model: BuildModel
) -> None:
    loaded = quantised_model(build_model, tie_word_embeddings=is_tied)
    before = {count: logits(loaded, count) for count in (1, 3, 6)}
    if is_fused:
        FusedLayers.fuse(loaded.model, loaded.dtype, loaded.context.longest)
    backend, counting = counting_backend()
    number = use_few_rows(loaded, [backend] * len(loaded.layers), always_faster())
    layers = len(loaded.layers)
    # Of a layer q, k, v, o, gate, up and down; fused ones share two products. And heads.
    assert number >= layers * (4 if is_fused else 7) + 1
    # Without pages q, k and v of a fused layer are called alone, as mlx's own.
    called = layers * (3 if is_fused else 7) + 1
    for count, expected in before.items():
        counting.calls.clear()
        assert mx.array_equal(logits(loaded, count), expected)
        assert [rows for rows, _ in counting.calls] == ([3] * called if count == 3 else [])


def test_joined_products_and_heads_are_replaced(build_model: BuildModel) -> None:
    loaded = quantised_model(build_model, tie_word_embeddings=True)
    FusedLayers.fuse(loaded.model, loaded.dtype, loaded.context.longest)
    backend, _ = counting_backend()
    use_few_rows(loaded, [backend], always_faster())
    products = joined_products(loaded.model)
    assert len(products) == 2 * len(loaded.layers)
    assert all(product.multiply is not mx.quantized_matmul for product in products)
    x = mx.random.normal((3, 1, 256), key=mx.random.key(1)).astype(mx.bfloat16)
    for product in products:
        found = product(x)
        product.multiply = mx.quantized_matmul
        alone = mx.concatenate([product(x[at : at + 1]) for at in range(3)])
        assert mx.array_equal(found, alone)
    kinds = {type(module) for module in loaded.model.modules()}
    assert {FewRowLinear, FewRowEmbedding} <= kinds


def test_a_bias_is_added(build_model: BuildModel) -> None:
    loaded = quantised_model(build_model)  # qwen2's q, k and v have one
    layer = loaded.model.layers[0].self_attn.q_proj
    layer.bias = mx.arange(layer.bias.size).astype(mx.bfloat16)
    x = mx.ones((2, 1, 256), mx.bfloat16)
    expected = layer(x)
    use_few_rows(loaded, [counting_backend()[0]], always_faster())
    assert type(layer) is FewRowLinear
    assert mx.array_equal(layer(x), expected)


def test_rows_of_another_dtype_are_mlx_own(build_model: BuildModel) -> None:
    loaded = quantised_model(build_model)
    backend, counting = counting_backend()
    use_few_rows(loaded, [backend], always_faster())
    layer = loaded.model.layers[0].self_attn.o_proj
    assert layer(mx.ones((2, 1, 256), mx.float32)).dtype == mx.float32
    assert counting.calls == []


def test_nothing_is_replaced_where_it_is_not_faster(
    build_model: BuildModel, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = quantised_model(build_model)
    with caplog.at_level(logging.INFO, "mlxserve.few_rows"):
        number = use_few_rows(loaded, [counting_backend()[0]], lambda _run: 1.0)
    assert number == 0
    assert "0 of " in caplog.text
    assert "MLX's own products are faster" in caplog.text
    assert not any(isinstance(module, FewRowLinear) for module in loaded.model.modules())


def test_nothing_is_tried_for_weights_of_other_kinds(build_model: BuildModel) -> None:
    backend, _ = counting_backend()
    in_6_bits = quantised_model(build_model, bits=6)
    assert use_few_rows(in_6_bits, [backend], always_faster()) == 0
    plain = prepare(*build_model("qwen2"), "plain")
    assert use_few_rows(plain, [backend], always_faster()) == 0


def test_nothing_is_tried_without_metal(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def try_few_rows(*_: object) -> None:
        raise AssertionError("tried")

    monkeypatch.setattr(few_row_products, "try_few_rows", try_few_rows)
    from metal_kernels.choice import select_backend

    loaded = quantised_model(build_model)
    metal, plain = emulated_backend(), select_backend("cpu")
    for backends in ([], [plain], [metal, plain], [plain, metal]):
        assert use_few_rows(loaded, backends) == 0
    with pytest.raises(AssertionError, match="tried"):
        use_few_rows(loaded, [metal])


def test_weights_take_no_more_memory(build_model: BuildModel) -> None:
    loaded = quantised_model(build_model)
    size = loaded.weight_size
    use_few_rows(loaded, [counting_backend()[0]], always_faster())
    assert loaded.weight_size == size
    assert read(logits(loaded, 2).astype(mx.float32)).any()
