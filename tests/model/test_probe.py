"""The probe accepts models whose paged logits equal their dense ones, and refuses all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention

from metal_kernels.choice import select_backend
from metal_kernels.quantised import quantise
from metal_kernels.x86.backend import X86Backend
from mlxserve.cache.layer_kv import LayerKV
from mlxserve.core.errors import UnsupportedModel
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.probe import probe
from tests.conftest import ATTENDING

REFERENCE = select_backend("cpu")
BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]


def test_a_supported_architecture_passes(build_model: BuildModel) -> None:
    for kind in ATTENDING:
        assert probe(prepare(*build_model(kind), kind), REFERENCE) < 1e-4, kind


def test_a_window_passes_whether_the_probe_is_longer_or_shorter(build_model: BuildModel) -> None:
    for window in [3, 16, 24, 200, 400]:
        for kind in ["gemma3_text", "gpt_oss"]:
            model = prepare(*build_model(kind, sliding_window=window), kind)
            assert probe(model, REFERENCE) < 1e-4, (window, kind)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_passes_with_its_own_tolerance(
    dtype: mx.Dtype, page_size: int, build_model: BuildModel
) -> None:
    model, config = build_model("qwen3")
    model.set_dtype(dtype)
    assert probe(prepare(model, config, "half"), REFERENCE, page_size) < 3e-2


def test_keys_and_values_in_8_bits_pass_with_a_tolerance_of_their_own(
    build_model: BuildModel,
) -> None:
    for kind in ATTENDING:
        # With wider heads rounding has this model choose other experts for a token.
        narrow = {"head_dim": 16} if kind == "qwen3_moe" else {}
        loaded = prepare(*build_model(kind, **narrow), kind).in_8_bits()
        assert 1e-3 < probe(loaded, REFERENCE) < 0.2, kind


class Excluding(nn.Module):  # type: ignore[misc]
    """A head that never chooses the first tokens, as Phi 3 small's."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def __call__(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self.head(hidden)
        return mx.concatenate([mx.full((*logits.shape[:-1], 7), -mx.inf), logits[..., 7:]], axis=-1)


def test_logits_of_minus_infinity_agree_with_themselves_alone(build_model: BuildModel) -> None:
    model, config = build_model("llama", tie_word_embeddings=False)
    model.lm_head = Excluding(model.lm_head)
    assert probe(prepare(model, config, "small"), REFERENCE) < 1e-4
    model, config = build_model("llama", tie_word_embeddings=False)
    model.lm_head = Excluding(model.lm_head)
    model.layers[1].self_attn = EveryKeyAgain(model.layers[1].self_attn)
    with pytest.raises(UnsupportedModel, match="different logits"):
        probe(prepare(model, config, "small"), REFERENCE)


class EveryKeyAgain(nn.Module):  # type: ignore[misc]
    """Attention that adds what depends on how many tokens it is given at once."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def __call__(self, x: mx.array, *arguments: Any) -> mx.array:
        return self.attention(x, *arguments) + mx.mean(x, axis=1, keepdims=True)


class ScaleOfAnotherHead(X86Backend):
    """Swaps the scales of rows of two heads as it writes them."""

    def write_kv(self, keys: mx.array, values: mx.array, *rest: Any) -> tuple[mx.array, mx.array]:
        keys, values = (swapped(quantise(rows)) for rows in (keys, values))
        return super().write_kv(keys, values, *rest)


def swapped(rows: mx.array) -> mx.array:
    return mx.concatenate([rows[..., :-4], rows[:, ::-1, -4:]], axis=-1)


class Unscaled(X86Backend):
    """Writes a scale of 1."""

    def write_kv(self, keys: mx.array, values: mx.array, *rest: Any) -> tuple[mx.array, mx.array]:
        keys, values = (with_scale_1(quantise(rows)) for rows in (keys, values))
        return super().write_kv(keys, values, *rest)


def with_scale_1(rows: mx.array) -> mx.array:
    ones = mx.ones((*rows.shape[:-1], 1)).view(mx.int8)
    return mx.concatenate([rows[..., :-4], ones], axis=-1)


@pytest.mark.parametrize(
    "wrong", [ScaleOfAnotherHead(), Unscaled()], ids=lambda b: type(b).__name__
)
def test_wrong_scales_are_refused(wrong: X86Backend, build_model: BuildModel) -> None:
    loaded = prepare(*build_model("qwen3"), "small").in_8_bits()
    with pytest.raises(UnsupportedModel, match=r"different logits .* 2e-01 is allowed"):
        probe(loaded, wrong)


# ---- planted faults: layers that only a comparison of logits can catch


class Planted(llama.Attention):  # type: ignore[misc]
    """Llama's attention, written out so that a subclass can change one step."""

    window: int | None = None

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        x = self.taken(x)
        shape = (*x.shape[:2], -1, self.head_dim)
        queries = self.q_proj(x).reshape(shape).swapaxes(1, 2)
        keys = self.k_proj(x).reshape(shape).swapaxes(1, 2)
        values = self.v_proj(x).reshape(shape).swapaxes(1, 2)
        offset = self.position(cache.offset)
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=cache.offset)
        if self.window is not None and x.shape[1] > 1:
            mask = create_causal_mask(x.shape[1], cache.offset, window_size=self.window)
        keys, values = cache.update_and_fetch(keys, values)
        output = self.attended(queries, keys, values, mask, cache)
        projected: mx.array = self.o_proj(output.swapaxes(1, 2).reshape(*x.shape[:2], -1))
        return projected

    def taken(self, x: mx.array) -> mx.array:
        return x

    def position(self, offset: Any) -> Any:
        return offset

    def attended(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        output: mx.array = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return output


class Shifted(Planted):
    """Uses positions that are off by one."""

    def position(self, offset: Any) -> Any:
        return offset + 1 if isinstance(offset, mx.array) else offset


class OneOffset(Planted):
    """Uses the first row's position for all rows."""

    def position(self, offset: Any) -> Any:
        return offset[0] if isinstance(offset, mx.array) else offset


class Direct(Planted):
    """Ignores its cache: a row attends only to itself."""

    def attended(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        # Copies have no pages, also after a test whose model made mlx's own attention know pages.
        return mx.fast.scaled_dot_product_attention(
            queries, keys + 0, values + 0, scale=self.scale, mask=mask
        )


class ShortWindow(Planted):
    """Builds a sliding-window mask of its own, but not for a single token."""

    window = 7


class LongWindow(Planted):
    window = 40


class MixesRows(Planted):
    """Reads the neighbouring rows of the batch."""

    def taken(self, x: mx.array) -> mx.array:
        return x + 0.05 * mx.mean(x, axis=0, keepdims=True)


class NotANumber(Planted):
    def taken(self, x: mx.array) -> mx.array:
        return x if x.shape[0] == 1 else x * mx.nan


class ReadsTheCache(Planted):
    """Reads the cache's arrays directly."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        output: mx.array = super().__call__(x, mask, cache) + cache.keys.sum() * 0
        return output


class OwnMask(Planted):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        is_paged = isinstance(cache, LayerKV)
        return super().__call__(x, mx.ones((1, 1), mx.bool_) if is_paged else mask, cache)


class LooksUp(Planted):
    """Looks up the type of its offset and does not know that of a paged cache."""

    def position(self, offset: Any) -> Any:
        return {int: offset}[type(offset)]


def planted(kind: type[nn.Module], build_model: BuildModel, layer: int = 1, **config: Any) -> str:
    """Plant a layer into a llama; the message with which the probe refuses it."""
    model, settings = build_model("llama", **config)
    model.model.layers[layer].self_attn.__class__ = kind
    loaded = prepare(model, settings, "tiny")
    with pytest.raises(UnsupportedModel) as caught:
        probe(loaded, REFERENCE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_planted_layer_passes_without_a_fault(build_model: BuildModel) -> None:
    model, config = build_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Planted
    assert probe(prepare(model, config, "tiny"), REFERENCE) < 1e-4


def test_a_layer_with_wrong_logits_is_caught(build_model: BuildModel) -> None:
    for kind in [Shifted, OneOffset, Direct, ShortWindow, MixesRows]:
        for layer in [0, 2]:
            text = planted(kind, build_model, layer)
            assert "this llama model computes different logits" in text, (kind, layer)
            assert "it cannot be served" in text, (kind, layer)


def test_a_wrong_window_is_caught_if_the_config_names_a_window(
    build_model: BuildModel,
) -> None:
    assert "llama model computes different logits" in planted(
        LongWindow, build_model, sliding_window=40
    )


def test_nan_logits_are_caught(build_model: BuildModel) -> None:
    assert "this llama model computes different logits with a paged cache (by nan" in planted(
        NotANumber, build_model
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ReadsTheCache, "'LayerKV' object has no attribute 'keys'"),
        (OwnMask, "a mask of the model's own"),
        (LooksUp, "array"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_layer_that_raises_is_refused_and_the_log_says_why(
    kind: type[nn.Module],
    reason: str,
    build_model: BuildModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "mlxserve.probe")
    text = planted(kind, build_model)
    assert "the attention of this llama model cannot be computed over pages" in text
    assert reason not in text
    assert reason in caplog.text


# ---- half precision: a router's ties, and what is wrong all the same


class UnsteadyRouter(nn.Linear):  # type: ignore[misc]
    """A router whose scores depend on the shape of the call, as a device's rounding does."""

    noise = 0.01

    def __call__(self, x: mx.array) -> mx.array:
        scores = super().__call__(x)
        key = mx.random.key(1000 * x.shape[0] + x.shape[1])
        rounding: mx.array = self.noise * mx.random.normal(scores.shape, key=key)
        return scores + rounding.astype(scores.dtype)


class ShiftedExperts(UnsteadyRouter):
    """Chooses other experts for the rows of a paged step."""

    def __call__(self, x: mx.array) -> mx.array:
        scores = super().__call__(x)
        return mx.roll(scores, 1, axis=-1) if x.shape[1] == 1 and x.shape[0] > 1 else scores


class WrongDecodes:
    """A backend whose decodes are wrong, and nothing else."""

    def __init__(self) -> None:
        self._backend = REFERENCE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def paged_decode(self, *args: Any, **options: Any) -> mx.array:
        return -self._backend.paged_decode(*args, **options)


def half_precision_moe(build_model: BuildModel, seed: int, router: type[nn.Linear]) -> LoadedModel:
    """In bfloat16, its experts quantised: the CPU's product of chosen experts takes no other."""
    model, config = build_model("qwen3_moe", head_dim=16, seed=seed)
    model.set_dtype(mx.bfloat16)
    nn.quantize(
        model,
        group_size=32,
        bits=8,
        class_predicate=lambda path, part: "switch_mlp" in path and hasattr(part, "to_quantized"),
    )
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = router
    return prepare(model, config, "moe")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_model_whose_router_breaks_ties_by_rounding_passes(
    seed: int, build_model: BuildModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxserve.probe")
    loaded = half_precision_moe(build_model, seed, UnsteadyRouter)
    assert probe(loaded, REFERENCE) > 0.15, "a row of it is far outside the tolerance"
    assert "two dense runs within" in caplog.text


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_half_precision_model_that_chooses_wrong_experts_is_caught(
    seed: int, build_model: BuildModel
) -> None:
    loaded = half_precision_moe(build_model, seed, ShiftedExperts)
    with pytest.raises(UnsupportedModel, match="computes different logits"):
        probe(loaded, REFERENCE)


def test_a_wrong_layer_is_caught_in_half_precision(build_model: BuildModel) -> None:
    for dtype in [mx.float16, mx.bfloat16]:
        for kind in [Shifted, OneOffset, Direct, ShortWindow, NotANumber]:
            model, config = build_model("llama")
            model.set_dtype(dtype)
            for layer in model.model.layers:
                layer.self_attn.__class__ = kind
            with pytest.raises(UnsupportedModel, match="computes different logits"):
                probe(prepare(model, config, "tiny"), REFERENCE)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_wrong_decodes_are_caught_although_most_rows_are_chunks(
    seed: int, build_model: BuildModel
) -> None:
    loaded = half_precision_moe(build_model, seed, UnsteadyRouter)
    with pytest.raises(UnsupportedModel, match="computes different logits"):
        probe(loaded, WrongDecodes())


def test_a_long_window_is_caught_in_half_precision(build_model: BuildModel) -> None:
    model, config = build_model("llama", sliding_window=40)
    model.set_dtype(mx.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.__class__ = LongWindow
    with pytest.raises(UnsupportedModel, match="computes different logits"):
        probe(prepare(model, config, "tiny"), REFERENCE)
