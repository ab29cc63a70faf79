"""Layers are fused where fewer kernels compute the same, and nowhere else."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from metal_kernels.metal import MetalBackend
from metal_kernels.reading import read
from metal_kernels.reference import ReferenceBackend
from metal_kernels.step_ways import StepWay
from metal_kernels.x86.backend import X86Backend
from mlxserve.cache.kv import KVPool
from mlxserve.core.errors import UnsupportedModel
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model import attention
from mlxserve.model.attention import choose_attention
from mlxserve.model.batch import Batch
from mlxserve.model.fused_layers import FusedLayers, can_fuse
from mlxserve.model.fused_qkv import FusedQKV, fuse_qkv
from mlxserve.model.joined_products import JoinedProduct, SharedLayer, can_join, share
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.paged import use_paged_attention
from mlxserve.model.probe import probe
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from tests.conftest import each_of
from tests.emulated import emulated_backend
from tests.model import coverage, small_models

BuildModel = Callable[..., tuple[Any, dict[str, Any]]]

# The layers of each small model whose attention is fused, of how many.
FUSED = {
    "llama": (3, 3),
    "qwen2": (3, 3),
    "qwen3": (3, 3),
    "qwen3_moe": (3, 3),
    "gemma3_text": (3, 3),
    "gpt_oss": (3, 3),
    "glm4": (3, 3),
    "granite": (3, 3),
    "gemma2": (3, 3),
    "qwen3_next": (2, 4),
    "olmo2": (0, 3),  # norms of all heads together
    "phi3": (0, 3),  # one projection already
}
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7},
}


def fused_model(
    build_model: BuildModel, kind: str, **changes: Any
) -> tuple[LoadedModel, FusedLayers]:
    loaded = prepare(*build_model(kind, head_dim=64, **changes), kind)
    return loaded, FusedLayers.fuse(loaded.model, loaded.dtype, loaded.context.longest)


@pytest.mark.slow
@pytest.mark.parametrize("kind", each_of(FUSED))
def test_usual_attention_is_fused_and_the_probe_finds_it_right(
    kind: str, build_model: BuildModel
) -> None:
    loaded, fused = fused_model(build_model, kind)
    layers = loaded.caches.nodes
    assert (len(fused.attention), len(layers)) == FUSED[kind]
    assert probe(loaded, ReferenceBackend()) < 1e-4
    assert probe(loaded, emulated_backend()) < 1e-4
    probe(loaded.in_8_bits(), emulated_backend())


@pytest.mark.parametrize("kind", ["lfm2", "phi", "gptj"])
def test_attention_is_fused_whatever_its_input_and_its_last_projection_are_called(
    kind: str,
) -> None:
    config = coverage.rows("mlx-lm")[kind]["config"]
    loaded = prepare(*small_models.build(kind, config), kind)
    fused = FusedLayers.fuse(loaded.model, loaded.dtype, loaded.context.longest)
    assert len(fused.attention) == len(loaded.layers)
    assert probe(loaded, ReferenceBackend()) < 1e-4


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_rope_is_the_models_own(kind: str, build_model: BuildModel) -> None:
    scaling = {"rope_type": kind, **SCALINGS[kind]}
    loaded, fused = fused_model(build_model, "llama", rope_scaling=scaling)
    assert len(fused.attention) == len(loaded.layers)
    assert probe(loaded, ReferenceBackend()) < 1e-4


def test_layers_that_turn_alike_share_cosines_and_sines(build_model: BuildModel) -> None:
    _, fused = fused_model(build_model, "gemma3_text", rope_theta=1e6)
    ropes = [vars(layer)["_mlxserve_fused"].rope for layer in fused.attention]
    assert len(set(ropes)) == 2  # of layers with a window and without


# Gemma 4 without layers that read another one's keys: values have a norm, and may be the keys as projected.
GEMMA_4: list[dict[str, Any]] = [
    {"num_kv_shared_layers": 0},
    {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
]


@pytest.mark.parametrize("changes", GEMMA_4, ids=["norms of values", "values are keys"])
def test_norms_of_values_are_part_of_the_kernel(
    changes: dict[str, Any], build_model: BuildModel
) -> None:
    loaded, fused = fused_model(build_model, "gemma4_text", **changes)
    assert len(fused.attention) == len(loaded.layers) == 6
    epsilons = {len(vars(each)["_mlxserve_fused"].heads.epsilon) for each in fused.attention}
    assert epsilons == {3}
    assert probe(loaded, ReferenceBackend()) < 1e-4


@pytest.mark.slow
def test_norms_of_values_are_right_on_the_emulator(build_model: BuildModel) -> None:
    loaded, _ = fused_model(build_model, "gemma4_text", **GEMMA_4[1])
    assert probe(loaded, emulated_backend()) < 1e-4
    probe(loaded.in_8_bits(), emulated_backend())


def test_a_layer_whose_keys_a_later_one_reads_keeps_its_own_kernels(
    build_model: BuildModel,
) -> None:
    loaded, fused = fused_model(build_model, "gemma4_text")
    assert fused.attention == []
    assert probe(loaded, ReferenceBackend()) < 1e-4


def test_traditional_rope(build_model: BuildModel) -> None:
    loaded, fused = fused_model(build_model, "llama", rope_traditional=True)
    assert len(fused.attention) == len(loaded.layers)
    assert probe(loaded, ReferenceBackend()) < 1e-4


def test_half_precision_and_quantised_weights(build_model: BuildModel) -> None:
    model, config = build_model("qwen3", head_dim=64, hidden_size=128, intermediate_size=128)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    loaded = prepare(model, config, "quantised")
    size, before = loaded.weight_size, dense(loaded)
    fused = FusedLayers.fuse(loaded.model, loaded.dtype, loaded.context.longest)
    assert len(fused.attention) == len(fused.sharing) == len(loaded.layers)
    assert all(vars(layer)["_mlxserve_fused"].product for layer in fused.attention)
    assert loaded.weight_size == size
    assert mx.array_equal(dense(loaded), before)
    assert probe(loaded, ReferenceBackend()) < 0.1


def dense(loaded: LoadedModel) -> mx.array:
    logits: mx.array = loaded.model(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]]))
    return logits


class Unusual(llama.Attention):  # type: ignore[misc]  # mlx-lm has no types
    """llama's attention but for one thing, which only some rows show."""

    def __init__(self, usual: llama.Attention, what: str) -> None:
        nn.Module.__init__(self)
        for name, value in usual.children().items():
            self[name] = value
        self.heads = usual.n_heads, usual.n_kv_heads, usual.scale
        self.what = what

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        rows, length, _ = x.shape
        num, num_kv, scale = self.heads
        if self.what == "input":
            x = mx.clip(x, -1, 1)
        queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        queries, keys, values = (
            side.reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)
            for side, heads in ((queries, num), (keys, num_kv), (values, num_kv))
        )
        if self.what == "values":
            values = mx.fast.rms_norm(values, None, 1e-5)
        queries, keys = (
            self.rope(queries, offset=cache.offset),
            self.rope(keys, offset=cache.offset),
        )
        if self.what == "position":
            growth = 1 + 0.1 * mx.floor(cache.offset.astype(mx.float32) / 8192)
            queries = queries * growth.reshape(-1, 1, 1, 1)
        if self.what == "keys":
            keys = mx.clip(keys, -1.5, 1.5)
        keys, values = cache.update_and_fetch(keys, values)
        answer = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask
        )
        if self.what == "answer":
            answer = mx.tanh(answer)
        output: mx.array = self.o_proj(answer.transpose(0, 2, 1, 3).reshape(rows, length, -1))
        return output


def test_attention_that_does_anything_else_is_left_alone(build_model: BuildModel) -> None:
    for what in ["nothing", "input", "values", "position", "keys", "answer"]:
        model, _ = build_model("llama", head_dim=64)
        for layer in model.layers:
            layer.self_attn = Unusual(layer.self_attn, what)
        use_paged_attention(model)
        fused = fuse_qkv(model, mx.float32, 20_000)
        assert len(fused) == (len(model.layers) if what == "nothing" else 0), what


def test_weights_that_differ_in_kind_stay_separate_and_attention_is_fused(
    build_model: BuildModel,
) -> None:
    model, config = build_model("llama", head_dim=64, hidden_size=128, intermediate_size=128)
    for layer in model.layers:
        layer.self_attn.v_proj = layer.self_attn.v_proj.to_quantized(group_size=64, bits=8)
        layer.mlp.up_proj = layer.mlp.up_proj.to_quantized(group_size=64, bits=8)
    loaded = prepare(model, config, "mixed")
    fused = FusedLayers.fuse(loaded.model, loaded.dtype, 512)
    products = [vars(layer)["_mlxserve_fused"].product for layer in fused.attention]
    assert products == [None] * len(loaded.layers)
    assert fused.sharing == []
    assert probe(loaded, ReferenceBackend()) < 1e-4


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_joined_product_has_the_bits_of_its_layers_and_no_second_copy(
    bits: int | None, has_bias: bool
) -> None:
    layers: list[Any] = [nn.Linear(64, width, bias=has_bias) for width in (96, 32, 32)]
    if bits is not None:
        layers = [layer.to_quantized(group_size=32, bits=bits) for layer in layers]
    x = mx.random.normal((5, 1, 64), key=mx.random.key(1))
    expected = mx.concatenate([layer(x) for layer in layers], axis=-1)
    mx.eval(expected, [layer.parameters() for layer in layers])
    mx.clear_cache()
    before = mx.get_active_memory()
    assert can_join(layers)
    product = JoinedProduct(layers)
    assert mx.get_active_memory() <= before + 1024
    assert mx.array_equal(product(x), expected)
    assert mx.array_equal(mx.concatenate([layer(x) for layer in layers], axis=-1), expected)


def test_layers_that_do_not_belong_together_are_not_joined() -> None:
    usual = nn.Linear(64, 32, bias=False)
    for other in (
        nn.Linear(64, 32),
        nn.Linear(32, 32, bias=False),
        usual.to_quantized(group_size=64, bits=4),
        nn.Embedding(32, 64),
    ):
        assert not can_join([usual, other])
    fours = [usual.to_quantized(group_size=64, bits=bits) for bits in (4, 8)]
    assert not can_join(fours)
    assert not can_join([usual])


class Gated(nn.Module):  # type: ignore[misc]
    """A gated MLP, of whatever names and order."""

    def __init__(self, *, is_same: bool = True) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.is_same = is_same

    def __call__(self, x: mx.array) -> mx.array:
        other = x if self.is_same else x * 2
        y: mx.array = self.w2(nn.silu(self.w3(other)) * self.w1(x))
        return y


def test_layers_of_one_input_share_a_product_and_keep_nothing_of_a_step() -> None:
    module = Gated()
    x = mx.random.normal((3, 1, 64), key=mx.random.key(2))
    expected = module(x)
    mx.eval(expected)
    (sharing,) = share(module, mx.float32)
    assert sharing.names == ("w3", "w1")
    assert isinstance(module.w1, SharedLayer)
    assert mx.array_equal(module(x), expected)
    assert mx.array_equal(module(x), expected)
    assert mx.array_equal(module.w1(x), module.w1.layer(x))
    assert mx.array_equal(module(x), expected)
    seen = weakref.ref(x)
    del x
    gc.collect()
    assert seen() is None
    sharing.undo()
    assert type(module.w1) is nn.Linear
    x = mx.random.normal((3, 1, 64), key=mx.random.key(2))
    assert mx.array_equal(module(x), expected)


def test_recurrent_layers_share_the_product_of_their_input(build_model: BuildModel) -> None:
    loaded, fused = fused_model(build_model, "qwen3_next")
    names = [sharing.names for sharing in fused.sharing]
    assert names.count(("in_proj_qkvz", "in_proj_ba")) == len(loaded.states)


def test_fused_models_find_their_layers_and_arrays_without_python(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, fused = fused_model(build_model, "qwen3_next")
    expected, asked = dense(loaded), []
    plain = nn.Module.__getattr__

    def watched(module: nn.Module, name: str) -> Any:
        asked.append(name)
        return plain(module, name)

    monkeypatch.setattr(nn.Module, "__getattr__", watched)
    assert mx.array_equal(dense(loaded), expected)
    assert asked == []
    fused.undo()
    dense(loaded)
    assert {"self_attn", "linear_attn", "mlp", "in_proj_ba", "A_log", "weight"} <= {*asked}
    assert not any(vars(module).keys() & module.keys() for module in loaded.model.modules())


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_chunk_alone_is_called_as_mlx_lm_calls_it_where_attention_beside_states_is_fused(
    is_fused: bool, build_model: BuildModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, fused = fused_model(build_model, "qwen3_next")
    if not is_fused:
        fused.undo()
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
    expected = loaded.model(mx.array([ids]))[0]
    mx.eval(expected)
    shapes, kind = [], type(loaded.model)
    plain = kind.__call__

    def watched(model: nn.Module, tokens: mx.array, **options: Any) -> mx.array:
        shapes.append(tokens.shape)
        logits: mx.array = plain(model, tokens, **options)
        return logits

    monkeypatch.setattr(kind, "__call__", watched)
    runner = ModelRunner(loaded, KVPool(loaded.layers, 4, 16, ReferenceBackend()))
    first, second = (
        LiveRequest(Request(name, ids, SamplingParams(temperature=0))) for name in "ab"
    )
    pages = {first: as_page_table([2, 0]), second: as_page_table([3, 1])}

    def logits_of(*cuts: tuple[LiveRequest, int, int], all_rows: bool = False) -> mx.array:
        chunks = [Chunk(r, begin, end - begin, pages[r], samples=True) for r, begin, end in cuts]
        batch = Batch.from_chunks(chunks, 16)
        return runner.logits(batch, mx.array(batch.tokens), all_rows=all_rows)

    # Alone, its last row and all rows; then beside a decode.
    found = [
        (logits_of((first, 0, 7), all_rows=True), expected[:7]),
        (logits_of((first, 7, 18)), expected[17:18]),
        (logits_of((second, 0, 5)), expected[4:5]),
        (logits_of((first, 18, 19), (second, 5, 19)), mx.stack([expected[18]] * 2)),
    ]
    alone = [(1, num) if is_fused else (num, 1) for num in (7, 11, 5)]
    assert shapes == [*alone, (15, 1)]
    for logits, wanted in found:
        assert mx.allclose(logits, wanted, rtol=1e-4, atol=1e-4)


def test_layers_of_different_inputs_share_nothing() -> None:
    module = Gated(is_same=False)
    assert share(module, mx.float32) == []
    assert type(module.w1) is nn.Linear


def test_only_layers_that_are_all_on_metal_and_here_are_fused(build_model: BuildModel) -> None:
    loaded = prepare(*build_model("llama", head_dim=64), "tiny")
    metal = MetalBackend(lambda _spec, _source: pytest.fail("no kernel is made"))
    assert can_fuse(loaded, metal)
    assert can_fuse(loaded, [metal, metal])
    assert not can_fuse(loaded, [metal, X86Backend()])
    assert not can_fuse(loaded, X86Backend())
    metal.without = frozenset([StepWay.ROTATED])
    assert not can_fuse(loaded, metal)


def test_a_fused_model_that_the_probe_refuses_is_served_as_it_was(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = prepare(*build_model("llama", head_dim=64), "tiny")
    backend = emulated_backend()
    right = FusedQKV.output
    monkeypatch.setattr(attention, "select_backends", lambda _name, layers: [backend] * len(layers))
    monkeypatch.setattr(FusedQKV, "output", lambda *args: 1.5 * right(*args))
    monkeypatch.setattr("mlxserve.model.fused_qkv.is_near", lambda *_: True)
    with caplog.at_level(logging.INFO, "mlxserve.attention"):
        choice = choose_attention("metal", loaded)
    assert choice.difference < 1e-4
    assert "keeps its layers as they are" in caplog.text
    assert not [each for _, each in loaded.model.named_modules() if isinstance(each, SharedLayer)]
    assert not any("_mlxserve_fused" in vars(layer.self_attn) for layer in loaded.model.layers)


def test_a_model_on_metal_is_fused_and_one_with_adapters_is_not(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = emulated_backend()
    monkeypatch.setattr(attention, "select_backends", lambda _name, layers: [backend] * len(layers))
    for may_fuse in (False, True):
        loaded = prepare(*build_model("llama", head_dim=64), "tiny")
        names = [name for name, _ in tree_flatten(loaded.model.parameters())]
        choose_attention("metal", loaded, may_fuse=may_fuse)
        is_fused = "_mlxserve_fused" in vars(loaded.model.layers[0].self_attn)
        assert is_fused == may_fuse
        assert (names == [n for n, _ in tree_flatten(loaded.model.parameters())]) != may_fuse


def test_a_fused_layer_answers_a_dense_cache_as_before(build_model: BuildModel) -> None:
    loaded, fused = fused_model(build_model, "llama")
    layer = fused.attention[0]
    x = mx.random.normal((1, 4, 64), key=mx.random.key(5))
    found = layer(x, "causal", KVCache())
    fused.undo()
    assert mx.array_equal(found, layer(x, "causal", KVCache()))
    assert read(found).any()
    assert probe(loaded, ReferenceBackend()) < 1e-4


def test_the_door_refuses_wrong_kernels_as_before(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(ReferenceBackend):
        name = "metal"

        def paged_prefill(self, *args: Any) -> mx.array:
            return 1.5 * super().paged_prefill(*args)

    loaded = prepare(*build_model("llama", head_dim=64), "tiny")
    monkeypatch.setattr(attention, "select_backends", lambda _name, layers: [Wrong()] * len(layers))
    with pytest.raises(UnsupportedModel, match="different logits"):
        choose_attention("metal", loaded)
