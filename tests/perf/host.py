"""The host's part of a step on Metal: CPU time to build a step's graph, beside mlx-lm's own.

    ours    Batch.from_chunks, the model over a MetalBackend, sampling          per step, nothing evaluated
    mlx-lm  the same model over KVCache or BatchKVCache, sampling

A GPU waits for this time wherever it exceeds the GPU's own, which it does with small models. Nothing
is computed, so that sizes do not matter: layers and heads are those of an 8B model, the rest is small. Kernels
are recorded: the factory's return arrays that depend on the inputs. A real call of `metal_kernel` also looks its
kernel up by its text; the report has the number of calls. On a CPU the ops of `mx.fast` are built from
a dozen others each; one op takes their place here, for both.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_kernels.metal import MetalBackend
from mlxserve.bench.report import Figure, Report
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.cache.window_kv import pools_of
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.fused_layers import FusedLayers
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.model.step_graphs import TIMES_BEFORE
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from tests.perf import host_states
from tests.perf.dispatches import of_a_layer
from tests.perf.recording_factory import RecordingFactory, single_ops

PAGE_SIZE = 32
CONTEXT = 1_000
DRAFTED_LAYERS = 64  # of a model that is worth drafting for
_COMMON = {
    "hidden_size": 128,
    "num_hidden_layers": 36,
    "intermediate_size": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 1024,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3": _COMMON,
    "llama": _COMMON,
    # Five of six layers have a window, in a pool of its own.
    "gemma3_text": {
        **_COMMON,
        "num_hidden_layers": 34,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {
        **_COMMON,
        "num_hidden_layers": 30,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    # Every second layer has a window; sinks, and experts.
    "gpt_oss": {
        **_COMMON,
        "num_hidden_layers": 24,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "sliding_window_pattern": 2,  # no field of the definition, whose default it is
    },
}


@dataclass(frozen=True)
class Contenders:
    """One step of a model, built by us and by mlx-lm."""

    ours: Callable[[], mx.array]
    theirs: Callable[[], mx.array]
    factory: RecordingFactory


def bench_host(*, decodes: Sequence[int], chunk: int, rounds: int, steps: int) -> Report:
    """Milliseconds to build a step: `decodes` requests, or one chunk of a prompt; dispatches of a layer."""
    figures: list[Figure] = []
    for kind in GEOMETRIES:
        model = Model.of(kind)
        workloads = {
            **{f"{kind}, {n} decodes": model.decoding(n) for n in decodes},
            f"{kind}, chunk of {chunk}": model.prefilling(chunk),
        }
        with single_ops():
            for name, contenders in workloads.items():
                figures += _figures(name, contenders, rounds, steps)
        figures += _dispatch_figures(kind, chunk)
    figures += draft_figures(rounds, steps)
    figures += host_states.figures(decodes, chunk, rounds, steps)
    settings = {"context": CONTEXT, "page_size": PAGE_SIZE, "rounds": rounds, "steps": steps}
    return Report("host", settings, tuple(figures))


def _dispatch_figures(kind: str, chunk: int) -> Iterator[Figure]:
    """Of a layer: fused, with the model's own operations, and mlx-lm's."""
    steps: dict[str, Callable[[Model], Contenders]] = {
        "2 decodes": lambda model: model.decoding(2),
        f"chunk of {chunk}": lambda model: model.prefilling(chunk),
    }
    for name, step in steps.items():
        for who in ("ours", "ours, not fused", "mlx-lm"):
            found = layer_dispatches(kind, step, who).total()
            yield Figure(f"{kind}, {name}: dispatches of a layer, {who}", "", (float(found),))


def draft_figures(rounds: int, steps: int) -> Iterator[Figure]:
    """A step that verifies three drafted tokens, beside one without a draft."""
    drafted, plain = Model.of("qwen3", num_layers=DRAFTED_LAYERS).verifying(3)
    ratios = []
    with single_ops():
        for _ in range(rounds):
            for build in (drafted.ours, plain.ours) * (TIMES_BEFORE + 1):
                build()
            gc.collect()
            pairs = [(_seconds(drafted.ours), _seconds(plain.ours)) for _ in range(steps)]
            ratios.append(median(a for a, _ in pairs) / median(b for _, b in pairs))
    yield Figure(
        f"qwen3, {DRAFTED_LAYERS} layers, 3 drafted tokens: ratio to none", "", tuple(ratios)
    )


def layer_dispatches(
    kind: str, step: Callable[[Model], Contenders], who: str = "ours"
) -> Counter[str]:
    """Of one layer in a step that Python builds, by name."""
    builds = []
    fewest = GEOMETRIES[kind].get("sliding_window_pattern", 1)  # with a layer that sees everything
    for num_layers in (fewest, fewest + 1):
        model = Model.of(kind, is_fused=who == "ours", num_layers=num_layers)
        contenders = step(model)
        builds.append(contenders.theirs if who == "mlx-lm" else contenders.ours)
    with single_ops():
        return of_a_layer(*builds)


def _figures(name: str, contenders: Contenders, rounds: int, steps: int) -> list[Figure]:
    ours, theirs = [], []
    contenders.ours()
    calls = contenders.factory.num_calls
    for _ in range(rounds):
        for build in (contenders.ours, contenders.theirs) * (TIMES_BEFORE + 1):
            build()  # until steps of these shapes are recorded
        gc.collect()
        # In turn: neither finds in the processor's caches what it used itself just now.
        pairs = [(_seconds(contenders.ours), _seconds(contenders.theirs)) for _ in range(steps)]
        ours.append(1e3 * median(a for a, _ in pairs))
        theirs.append(1e3 * median(b for _, b in pairs))
    ratios = tuple(a / b for a, b in zip(ours, theirs, strict=True))
    return [
        Figure(f"{name}: ours ({calls} kernel calls)", "ms", tuple(ours)),
        Figure(f"{name}: mlx-lm", "ms", tuple(theirs)),
        Figure(f"{name}: ratio", "", ratios),
    ]


def _seconds(build: Callable[[], object]) -> float:
    """CPU time of this thread for a step. Its graph is freed within it, as it is after each step."""
    began = time.thread_time()
    build()
    return time.thread_time() - began


@dataclass(frozen=True)
class Model:
    """A model of 4-bit weights."""

    dense: nn.Module
    paged: LoadedModel

    @classmethod
    def of(cls, kind: str, *, is_fused: bool = True, num_layers: int | None = None) -> Model:
        """`num_layers`: None for those of the geometry."""
        sizes = GEOMETRIES[kind]
        sizes = {**sizes, "num_hidden_layers": num_layers or sizes["num_hidden_layers"]}
        module = importlib.import_module(f"mlx_lm.models.{kind}")

        def make() -> nn.Module:
            model = module.Model(module.ModelArgs.from_dict({"model_type": kind, **sizes}))
            model.set_dtype(mx.bfloat16)
            nn.quantize(model, group_size=64, bits=4)
            mx.eval(model.parameters())
            return model

        dense, paged = make(), prepare(make(), {"model_type": kind, **sizes}, "host")
        if is_fused:
            FusedLayers.fuse(paged.model, mx.bfloat16, sizes["max_position_embeddings"])
        return cls(dense, paged)

    def decoding(self, num: int) -> Contenders:
        """`num` requests that decode."""
        from mlx_lm.models.cache import (
            BatchKVCache,
            BatchRotatingKVCache,
            KVCache,
            RotatingKVCache,
        )

        def cache(window: int | None) -> Any:
            if num == 1:
                return KVCache() if window is None else RotatingKVCache(window)
            padding = [0] * num
            return (
                BatchKVCache(padding) if window is None else BatchRotatingKVCache(window, padding)
            )

        return self._contenders([1] * num, mx.zeros((num, 1), mx.int32), cache)

    def prefilling(self, length: int) -> Contenders:
        """One request's chunk of `length` tokens."""
        from mlx_lm.models.cache import KVCache, RotatingKVCache

        def cache(window: int | None) -> Any:
            return KVCache() if window is None else RotatingKVCache(window)

        return self._contenders([length], mx.zeros((1, length), mx.int32), cache)

    def verifying(self, num_drafted: int) -> tuple[Contenders, Contenders]:
        """One request that verifies a draft, and the same without one."""
        from mlx_lm.models.cache import KVCache

        def made(num: int) -> Contenders:
            tokens = mx.zeros((1, 1 + num), mx.int32)
            return self._contenders([1 + num], tokens, lambda _: KVCache(), num)

        return made(num_drafted), made(0)

    def _contenders(
        self,
        lengths: Sequence[int],
        tokens: mx.array,
        cache: Callable[[int | None], Any],
        num_drafted: int = 0,
    ) -> Contenders:
        """cache: mlx-lm's of a layer with this window"""
        factory = RecordingFactory()
        shared = -(-(CONTEXT + max(lengths)) // PAGE_SIZE)
        own = -(-max(lengths) // PAGE_SIZE) + 1
        num_pages = shared + own * len(lengths)
        backend, layers = MetalBackend(factory), self.paged.layers
        kv, windows = KVPool(layers, num_pages, PAGE_SIZE, backend), None
        if any(spec.window is not None for spec in layers):
            sizes = (num_pages, num_pages), (None, None)
            kv, windows = pools_of(layers, backend, PAGE_SIZE, *sizes)
        pools = (kv,) if windows is None else (kv, windows.kv)
        k_pools = [array for pool in pools for array in pool.arrays()[: len(pool.specs)]]
        computed = backend.fences.state(k_pools)
        runner = ModelRunner(self.paged, kv, windows=windows)
        chunks = []
        for number, length in enumerate(lengths):
            # Only the pages that are written differ: nothing reads them.
            begin = shared + own * number
            pages = as_page_table(chain(range(shared - own), range(begin, begin + own)))
            request = LiveRequest(
                Request(str(number), [0] * (CONTEXT + length), SamplingParams(temperature=0))
            )
            in_windows = None if windows is None else pages
            chunks.append(
                Chunk(
                    request,
                    CONTEXT,
                    length,
                    pages,
                    samples=True,
                    draft=(0,) * num_drafted,
                    window_table=in_windows,
                )
            )

        used = [_filled(cache(spec.window), spec, len(tokens)) for spec in layers]
        fresh = [dict(vars(each)) for each in used]

        def theirs() -> mx.array:
            for each, state in zip(used, fresh, strict=True):
                vars(each).update(state)
            logits = self.dense(tokens, cache=used)[:, -1, :]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            return mx.argmax(logprobs, axis=-1)

        def ours() -> mx.array:
            done = runner.build(chunks).done
            backend.fences.resume(k_pools, computed)  # as if it were, which frees its graph
            return done

        return Contenders(ours, theirs, factory)


def _filled(cache: Any, spec: LayerSpec, num: int) -> Any:
    """A cache of mlx-lm with the contexts of `num` sequences."""
    shape = (num, spec.kv_heads, CONTEXT, spec.key_dim)
    cache.update_and_fetch(mx.zeros(shape, mx.bfloat16), mx.zeros(shape, mx.bfloat16))
    return cache
