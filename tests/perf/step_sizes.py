"""What decides how long a model's steps take: sizes of its weights and layers, and its dispatches.

Sizes are those of the catalogue's shapes, from mlx-lm's definition in full size, of which nothing is computed.
Dispatches are counted in the graph of a step of decodes that the product builds and records, with the same
layers in small sizes, which change no graph. Both are for one rank, without drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from metal_kernels.metal import MetalBackend
from mlxserve.cache.kv import KVPool
from mlxserve.cache.window_kv import pools_of
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.files import text_config
from mlxserve.model.fused_layers import FusedLayers
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.model.step_graphs import TIMES_BEFORE
from mlxserve.request import Chunk, LiveRequest, Request, RequestState, as_page_table
from tests import catalogue
from tests.perf.dispatches import dispatches
from tests.perf.host_states import one_recurrence
from tests.perf.recording_factory import RecordingFactory, single_ops

_PAGE_SIZE: Final = 32
_CONTEXT: Final = 64  # of the small model
_EMBEDDINGS: Final = (nn.Embedding, nn.QuantizedEmbedding)
# Sizes of the small model, by the names of the catalogue. Numbers of layers stay.
_SMALL: Final[Mapping[str, int]] = {
    **dict.fromkeys(("hidden_size", "block_dim", "vocab_size", "global_head_dim"), 128),
    **dict.fromkeys(("intermediate_size", "block_ff_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "head_dim"), 64),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    "num_experts": 16,
    **dict.fromkeys(("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 1),
}


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer that keeps keys and values. window: positions that a row sees; None for all"""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    def seen(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a model.

    weights, expert_weights: bytes that a row of a step of decodes reads: outside of experts, and of its experts
    products, expert_products: multiply-adds of a row, without the head
    all_experts: bytes of all experts, which a chunk reads
    state: bytes that a sequence keeps of its recurrent layers, read and written by each step
    recurrent_rows: rows of 128 numbers of recurrent matrices, which a token updates one by one
    """

    weights: int
    expert_weights: int
    products: int
    expert_products: int
    all_experts: int
    num_experts: int
    num_used: int
    num_expert_layers: int
    layers: tuple[AttentionLayer, ...]
    state: int
    recurrent_rows: int


class Model:
    """A model of the catalogue. What is computed of it is computed once."""

    def __init__(self, name: str, bits: int = 0) -> None:
        """name: the short one. bits: of all weights; 0 for the catalogue's"""
        known = catalogue.read()
        row = next(row for row in known["models"] if name in row["names"])
        self.name = name
        self._shape: Mapping[str, Any] = known["shapes"][row["shape"]]
        self._format = {**row, "bits": bits} if bits else row

    @functools.cached_property
    def sizes(self) -> StepSizes:
        return _sizes(self._shape, self._format)

    @functools.cached_property
    def dispatches(self) -> int:
        """Of a recorded step of one decode, without what only the next step reads."""
        with _counting():
            return _Decodes(_small(self._shape, self._format)).recorded()

    @functools.cached_property
    def dispatches_as_defined(self) -> int:
        """Of the same step of mlx-lm."""
        with _counting():
            model = _small(self._shape, self._format, is_fused=False).model
            caches, token = _caches(model), mx.zeros((1, 1), mx.int32)
            mx.eval(model(token, cache=caches), [each.state for each in caches])
            mx.enable_compile()
            logits = model(token, cache=caches)[:, -1]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            return dispatches([mx.argmax(logprobs, axis=-1)]).total()


@functools.cache
def model_of(name: str, bits: int = 0) -> Model:
    return Model(name, bits)


def _sizes(shape: Mapping[str, Any], weights_format: Mapping[str, Any]) -> StepSizes:
    text = dict(text_config(shape))
    num_experts = text.get("num_experts", 0)
    num_used = text.get("num_experts_per_tok", text.get("top_k_experts", 0))
    definition = catalogue.quantised(shape, weights_format)
    weights = experts = products = expert_products = 0
    with_experts = set()
    is_tied = text.get("tie_word_embeddings", "gemma" in shape["model_type"])
    for path, module in definition.named_modules():
        nbytes = sum(array.nbytes for array in module.values() if isinstance(array, mx.array))
        if not nbytes or (is_tied and path.endswith("lm_head")):
            continue
        values = _num_values(module)
        if ".switch_mlp." in path or ".experts." in path:
            experts += nbytes
            with_experts.add(path.rpartition(".")[0])
            expert_products += values
        elif isinstance(module, _EMBEDDINGS):
            weights += nbytes if is_tied else 0
        else:
            weights += nbytes
            products += 0 if path.endswith("lm_head") else values
    used = num_used / num_experts if num_experts else 0.0
    layers, state, rows = _kept(definition, text)
    return StepSizes(
        weights,
        int(experts * used),
        products,
        int(expert_products * used),
        experts,
        num_experts,
        num_used,
        len(with_experts),
        layers,
        state,
        rows,
    )


def _num_values(module: nn.Module) -> int:
    """Numbers of a matrix, or of those of all experts; 0 for anything else."""
    if "weight" not in module or module.weight.ndim < 2 or isinstance(module, nn.Conv1d):
        return 0
    bits = getattr(module, "bits", 0)
    size: int = module.weight.size
    return size * 32 // bits if bits else size


def _kept(definition: Any, text: Mapping[str, Any]) -> tuple[tuple[AttentionLayer, ...], int, int]:
    """Layers, bytes of states and rows of recurrent matrices, from caches of a step that is not computed."""
    layers, state, rows = [], 0, 0
    caches = _caches(definition)
    definition(mx.array([[1]]), cache=caches)
    for each in caches:
        if isinstance(each, ArraysCache):
            arrays = [array for array in each.cache if array is not None]
            state += sum(array.nbytes for array in arrays)
            rows += sum(array.size // array.shape[-1] for array in arrays if array.ndim == 4)
            continue
        _, kv_heads, _, head_dim = each.keys.shape
        window = getattr(each, "max_size", None)
        layers.append(AttentionLayer(text["num_attention_heads"], kv_heads, head_dim, window))
    return tuple(layers), state, rows


def _caches(definition: Any) -> list[Any]:
    text = getattr(definition, "language_model", definition)
    made: list[Any] = text.make_cache() if hasattr(text, "make_cache") else make_prompt_cache(text)
    return made


@contextmanager
def _counting() -> Iterator[None]:
    """What is computed for want of a state compiles nothing, which takes g++ a second for each function."""
    mx.disable_compile()
    with ExitStack() as patches:
        patches.enter_context(single_ops(is_compiled=True))
        patches.enter_context(patch.object(qwen3_5, "gated_delta_update", one_recurrence))
        patches.callback(mx.enable_compile)
        yield


def _small(
    whole: Mapping[str, Any], weights_format: Mapping[str, Any], *, is_fused: bool = True
) -> LoadedModel:
    shape = _shrunk(whole)
    definition = catalogue.quantised(shape, weights_format)
    draw = np.random.default_rng(0)

    def drawn(array: mx.array) -> mx.array:
        if array.dtype == mx.uint32:
            return mx.array(draw.integers(0, 2**32, array.shape, dtype=np.uint32))
        return mx.array(draw.standard_normal(array.shape, dtype=np.float32) * 0.02).astype(
            array.dtype
        )

    definition.update(tree_map(drawn, definition.parameters()))
    loaded = prepare(definition, catalogue.completed(shape), "small")
    if is_fused:
        FusedLayers.fuse(loaded.model, loaded.dtype, _CONTEXT)
    return loaded


def _shrunk(shape: Mapping[str, Any]) -> dict[str, Any]:
    small = {name: _SMALL.get(name, value) for name, value in shape.items()}
    if "text_config" in shape:
        small["text_config"] = _shrunk(shape["text_config"])
    return small


class _Decodes:
    """Steps of one request that decodes, token by token."""

    def __init__(self, loaded: LoadedModel) -> None:
        backend, windows = MetalBackend(RecordingFactory()), None
        num_pages = _CONTEXT // _PAGE_SIZE
        if any(spec.window is not None for spec in loaded.layers):
            sizes = (num_pages, num_pages), (None, None)
            kv, windows = pools_of(loaded.layers, backend, _PAGE_SIZE, *sizes)
        else:
            kv = KVPool(loaded.layers, num_pages, _PAGE_SIZE, backend)
        self._runner = ModelRunner(loaded, kv, windows=windows)
        self._pages = as_page_table(range(num_pages))
        self._window_pages = None if windows is None else self._pages
        params = SamplingParams(temperature=0)
        self._request = LiveRequest(Request("decodes", [1] * _CONTEXT, params))
        self._request.state = RequestState.RUNNING

    def recorded(self) -> int:
        """Return the dispatches of a step that was recorded."""
        for at in range(1 + TIMES_BEFORE):
            pending = self._runner.build([self._chunk(at)])
            self._runner.compute([pending.done])
            self._runner.collect(pending)
        mx.enable_compile()
        return dispatches([self._runner.build([self._chunk(1 + TIMES_BEFORE)]).done]).total()

    def _chunk(self, at: int) -> Chunk:
        return Chunk(
            self._request, at, 1, self._pages, samples=True, window_table=self._window_pages
        )
