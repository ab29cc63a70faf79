"""The host's part of a step where most layers are recurrent: 24 of them, and 8 with attention.

As `tests.perf.host`, with two differences. The state of a decode is what the step before has left, so
decodes are computed between the timed parts; chunks are built one after another, each of a sequence of its
own whose context was computed before. And the layers are small, which changes nothing in their graphs. The recurrence itself, a kernel of mlx-lm's on a GPU and a loop of ops on a CPU, is one op.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from metal_kernels.metal import MetalBackend
from mlxserve.bench.report import Figure
from mlxserve.cache.kv import KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.fused_layers import FusedLayers
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.model.step_graphs import TIMES_BEFORE
from mlxserve.request import Chunk, LiveRequest, Request, RequestState, as_page_table
from tests.perf.dispatches import of_a_layer
from tests.perf.recording_factory import RecordingFactory, single_ops

PAGE_SIZE = 32
CONTEXT = 200
NUM_LAYERS = 32
GEOMETRY: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "full_attention_interval": 4,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": list(range(NUM_LAYERS)),
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}

Steps = Callable[[int], Iterator[float]]  # takes as many steps: seconds to build each


def figures(decodes: Sequence[int], chunk: int, rounds: int, steps: int) -> Iterator[Figure]:
    """Milliseconds to build a step of as many decodes, or one chunk, and the ratio to mlx-lm's; dispatches
    of a layer."""
    dense, loaded = _model(), _fused_model()
    num_states = len(loaded.states)
    name = f"{num_states} recurrent and {len(loaded.layers)} attention layers"
    with single_ops(), _single_recurrence():
        workloads = [(f"{n} decodes", _decoding(dense, loaded, n)) for n in decodes]
        chunks = _Chunks(loaded, chunk).steps, _DenseChunks(dense, chunk).steps
        workloads.append((f"chunk of {chunk}", chunks))
        for what, each in workloads:
            a, b = [], []
            for _ in range(rounds):
                gc.collect()
                # Step by step in turn: neither finds in the processor's caches what it used itself just now.
                pairs = zip(*(one(steps) for one in each), strict=True)
                ours, theirs = map(median, zip(*pairs, strict=True))
                a.append(1e3 * ours)
                b.append(1e3 * theirs)
            ratios = tuple(x / y for x, y in zip(a, b, strict=True))
            yield Figure(f"{name}, {what}: ours", "ms", tuple(a))
            yield Figure(f"{name}, {what}: mlx-lm", "ms", tuple(b))
            yield Figure(f"{name}, {what}: ratio", "", ratios)
    for kind in LAYERS:
        for who in ("ours", "mlx-lm"):
            found = float(layer_dispatches(kind, chunk, who).total())
            yield Figure(f"{kind}, chunk of {chunk}: dispatches of a layer, {who}", "", (found,))


# Models that differ by such a layer, by their number of layers.
LAYERS = {"recurrent": (4, 5), "attention beside recurrent": (7, 8)}


def layer_dispatches(kind: str, chunk: int, who: str = "ours") -> Counter[str]:
    """Of one layer in a step with a chunk, by name, without what only later steps read."""
    builds: list[Callable[[], mx.array]] = []
    with single_ops(), _single_recurrence():
        for num in LAYERS[kind]:
            if who == "ours":
                builds.append(_Chunks(_fused_model(num), chunk).build)
            else:
                builds.append(_DenseChunks(_model(num), chunk).build)
        return of_a_layer(*builds)


def _decoding(dense: nn.Module, loaded: LoadedModel, num: int) -> tuple[Steps, Steps]:
    """Once steps of these shapes are recorded."""
    each = _ours(loaded, num), _theirs(dense, num)
    for step in each:
        for _ in range(TIMES_BEFORE + 1):
            step()
    ours, theirs = (lambda steps, one=one: (one() for _ in range(steps)) for one in each)
    return ours, theirs


def _fused_model(num_layers: int | None = None) -> LoadedModel:
    loaded = prepare(_model(num_layers), GEOMETRY, "host")
    FusedLayers.fuse(loaded.model, loaded.dtype, CONTEXT)
    return loaded


def _model(num_layers: int | None = None) -> nn.Module:
    sizes = {**GEOMETRY, "num_hidden_layers": num_layers or GEOMETRY["num_hidden_layers"]}
    model = qwen3_next.Model(qwen3_next.ModelArgs.from_dict(sizes))
    mx.eval(model.parameters())
    return model


def one_recurrence(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    a: mx.array,
    b: mx.array,
    *inputs: object,
    **_options: object,
) -> tuple[mx.array, mx.array]:
    """One op in the place of mlx-lm's kernel."""
    state = next((x for x in inputs if isinstance(x, mx.array) and x.ndim == 4), None)
    if state is None:
        batch, _, num_heads, value_dim = values.shape
        state = mx.zeros((batch, num_heads, value_dim, keys.shape[-1]), mx.float32)
    answer, state = mx.depends([values, state], [queries, keys, a, b])
    return answer, state


def _single_recurrence() -> AbstractContextManager[object]:
    return patch.object(qwen3_next, "gated_delta_update", one_recurrence)


class _Chunks:
    """Steps of ours with a chunk of `length` tokens after the context."""

    def __init__(self, loaded: LoadedModel, length: int) -> None:
        self._length = length
        num_pages = -(-(CONTEXT + length) // PAGE_SIZE)
        self._pages = as_page_table(range(num_pages))
        backend = MetalBackend(RecordingFactory())
        kv = KVPool(loaded.layers, num_pages, PAGE_SIZE, backend)
        k_pools = kv.arrays()[: len(loaded.layers)]
        computed = backend.fences.state(k_pools)
        self._runner = ModelRunner(loaded, kv)
        # As if a step were computed: fences would keep its graph, and those of all steps before.
        self._free_graph = partial(backend.fences.resume, k_pools, computed)

    def build(self) -> mx.array:
        [request] = self._begun(1)
        return self._built(request)

    def steps(self, steps: int) -> Iterator[float]:
        """Seconds of each, in which an earlier one's graph is freed."""
        first, *others = self._begun(1 + steps)
        self._built(first)
        for request in others:
            began = time.thread_time()
            self._built(request)
            self._runner.drop("states", [])
            yield time.thread_time() - began

    def _built(self, request: LiveRequest) -> mx.array:
        chunk = Chunk(request, CONTEXT, self._length, self._pages, samples=True)
        done = self._runner.build([chunk]).done
        request.state = RequestState.FINISHED
        self._free_graph()
        return done

    def _begun(self, num: int) -> list[LiveRequest]:
        """Requests whose context is computed."""
        ids, params = [1] * (CONTEXT + self._length), SamplingParams(temperature=0)
        requests = [LiveRequest(Request(str(number), ids, params)) for number in range(num)]
        for request in requests:
            request.state = RequestState.RUNNING
        chunks = [Chunk(r, 0, CONTEXT, self._pages, samples=False) for r in requests]
        self._runner.collect(self._runner.launch(chunks))
        return requests


class _DenseChunks:
    """The same steps of mlx-lm's."""

    def __init__(self, model: nn.Module, length: int) -> None:
        self._model = model
        self._tokens = mx.zeros((1, length), mx.int32)
        self._used = [_cache(layer, 1) for layer in model.model.layers]
        mx.eval(model(mx.zeros((1, CONTEXT), mx.int32), cache=self._used))
        mx.eval([_kept(each) for each in self._used])
        self._fresh = [
            {name: list(v) if isinstance(v, list) else v for name, v in vars(each).items()}
            for each in self._used
        ]

    def build(self) -> mx.array:
        for each, state in zip(self._used, self._fresh, strict=True):
            vars(each).update({n: list(v) if isinstance(v, list) else v for n, v in state.items()})
        return _chosen(self._model, self._tokens, self._used)

    def steps(self, steps: int) -> Iterator[float]:
        self.build()
        for _ in range(steps):
            began = time.thread_time()
            self.build()
            yield time.thread_time() - began


def _cache(layer: Any, num: int) -> Any:
    if layer.is_linear:
        return ArraysCache(2)
    return KVCache() if num == 1 else BatchKVCache([0] * num)


def _kept(cache: Any) -> list[mx.array]:
    return cache.cache if isinstance(cache, ArraysCache) else [cache.keys, cache.values]


def _chosen(model: nn.Module, tokens: mx.array, caches: list[Any]) -> mx.array:
    logits = model(tokens, cache=caches)[:, -1, :]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logprobs, axis=-1)


def _ours(loaded: LoadedModel, num: int) -> Callable[[], float]:
    """A function that computes one token more of each request, and returns the seconds to build the step."""
    each = CONTEXT // PAGE_SIZE + 40
    kv = KVPool(loaded.layers, num * each, PAGE_SIZE, MetalBackend(RecordingFactory()))
    runner = ModelRunner(loaded, kv)
    requests = []
    for number in range(num):
        ids = [1] * (each * PAGE_SIZE)
        request = LiveRequest(Request(str(number), ids, SamplingParams(temperature=0)))
        request.state = RequestState.RUNNING
        requests.append((request, as_page_table(range(number * each, (number + 1) * each))))
    end = CONTEXT

    def compute(chunks: list[Chunk]) -> float:
        began = time.thread_time()
        pending = runner.build(chunks)
        seconds = time.thread_time() - began
        runner.compute([pending.done])
        runner.collect(pending)
        return seconds

    for request, pages in requests:
        compute([Chunk(request, 0, CONTEXT, pages, samples=False)])

    def step() -> float:
        nonlocal end
        end += 1
        return compute([Chunk(r, end - 1, 1, pages, samples=True) for r, pages in requests])

    return step


def _theirs(model: nn.Module, num: int) -> Callable[[], float]:
    used = [_cache(layer, num) for layer in model.model.layers]
    mx.eval(model(mx.zeros((num, CONTEXT), mx.int32), cache=used))
    tokens = mx.zeros((num, 1), mx.int32)

    def step() -> float:
        began = time.thread_time()
        chosen = _chosen(model, tokens, used)
        seconds = time.thread_time() - began
        mx.eval(chosen, [_kept(each) for each in used])
        return seconds

    return step
