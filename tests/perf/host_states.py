"""The host's part of a step where most layers are recurrent: 24 of them, and 8 with attention.

As `tests.perf.host`, with two differences. The state of a step is what the one before has left, so the
steps are computed between the timed parts; and the layers are small, which changes nothing in their
graphs. The recurrence itself, a kernel of mlx-lm's on a GPU and a loop of ops on a CPU, is one op.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from metal_kernels.metal import MetalBackend
from mlxserve.bench.report import Figure
from mlxserve.cache.kv import KVPool
from mlxserve.model.fused_layers import FusedLayers
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.model.step_graphs import TIMES_BEFORE
from mlxserve.request import Chunk, LiveRequest, Request, RequestState, as_page_table
from mlxserve.sampling_params import SamplingParams
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


def figures(decodes: Sequence[int], chunk: int, rounds: int, steps: int) -> Iterator[Figure]:
    """Milliseconds to build a step of as many decodes, or one chunk, and the ratio to mlx-lm's."""
    dense, loaded = _model(), prepare(_model(), GEOMETRY, "host")
    FusedLayers.of(loaded.model, loaded.dtype, CONTEXT)
    num_states = len(loaded.states)
    name = f"{num_states} recurrent and {len(loaded.layers)} attention layers"
    with single_ops(), _single_recurrence():
        workloads = [(f"{num} decodes", num, 1) for num in decodes]
        for what, num, length in [*workloads, (f"chunk of {chunk}", 1, chunk)]:
            ours, theirs = _ours(loaded, num, length), _theirs(dense, num, length)
            for _ in range(TIMES_BEFORE + 1):
                ours(), theirs()
            a, b = [], []
            for _ in range(rounds):
                gc.collect()
                a.append(1e3 * median(ours() for _ in range(steps)))
                b.append(1e3 * median(theirs() for _ in range(steps)))
            ratios = tuple(x / y for x, y in zip(a, b, strict=True))
            yield Figure(f"{name}, {what}: ours", "ms", tuple(a))
            yield Figure(f"{name}, {what}: mlx-lm", "ms", tuple(b))
            yield Figure(f"{name}, {what}: ratio", "", ratios)


def _model() -> nn.Module:
    model = qwen3_next.Model(qwen3_next.ModelArgs.from_dict(GEOMETRY))
    mx.eval(model.parameters())
    return model


@contextmanager
def _single_recurrence() -> Iterator[None]:
    def one(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *_inputs: object,
        **_options: object,
    ) -> tuple[mx.array, mx.array]:
        state = next((x for x in _inputs if isinstance(x, mx.array) and x.ndim == 4), None)
        if state is None:
            batch, _, num_heads, value_dim = values.shape
            state = mx.zeros((batch, num_heads, value_dim, keys.shape[-1]), mx.float32)
        return mx.abs(values), mx.abs(state)

    old = qwen3_next.gated_delta_update
    qwen3_next.gated_delta_update = one
    try:
        yield
    finally:
        qwen3_next.gated_delta_update = old


def _ours(loaded: LoadedModel, num: int, length: int) -> Callable[[], float]:
    """A function that computes one step more, of `length` tokens of each request, and returns the seconds
    to build it. A chunk follows the same context each time."""
    each = (CONTEXT + length) // PAGE_SIZE + 40
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
        runner.start(pending)
        runner.collect(pending)
        return seconds

    def begin() -> None:
        for request, pages in requests:
            compute([Chunk(request, 0, CONTEXT, pages, samples=False)])

    begin()

    def step() -> float:
        nonlocal end
        if length > 1:
            begin()
        end = end + 1 if length == 1 else CONTEXT + length
        return compute(
            [Chunk(r, end - length, length, pages, samples=True) for r, pages in requests]
        )

    return step


def _theirs(model: nn.Module, num: int, length: int) -> Callable[[], float]:
    def cache(layer: Any) -> Any:
        if layer.is_linear:
            return ArraysCache(2)
        return KVCache() if num == 1 else BatchKVCache([0] * num)

    used = [cache(layer) for layer in model.model.layers]
    mx.eval(model(mx.zeros((num, CONTEXT), mx.int32), cache=used))
    tokens = mx.zeros((num, length), mx.int32)
    fresh = [dict(vars(each)) for each in used]

    def step() -> float:
        if length > 1:
            for each, state in zip(used, fresh, strict=True):
                vars(each).update(state)
        began = time.thread_time()
        logits = model(tokens, cache=used)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.argmax(logprobs, axis=-1)
        seconds = time.thread_time() - began
        kept = [c.cache if isinstance(c, ArraysCache) else [c.keys, c.values] for c in used]
        mx.eval(chosen, kept)
        return seconds

    return step
