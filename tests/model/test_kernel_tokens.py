"""The emulated kernels and the reference choose the same greedy tokens: long chunks, large heads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels.kernels import Kernel, KernelSpec
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Backend
from metal_kernels.reference import ReferenceBackend
from mlxserve.cache.kv import KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from tests.emulated import emulated_factory

BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]

PAGE = 16
NUM_ANSWER = 6
LATENTS = {"kv_lora_rank": 256, "qk_rope_head_dim": 64}  # which the kernels take


def answer(loaded: LoadedModel, backend: Backend, cuts: Sequence[int]) -> list[int]:
    """The greedy answer to a prompt of cuts[-1] tokens, computed in the chunks between the cuts."""
    draw = random.Random(4)
    prompt = [draw.randrange(loaded.vocab_size) for _ in range(cuts[-1])]
    request = LiveRequest(Request("one", prompt, SamplingParams(temperature=0)))
    pages = list(range(-(-(len(prompt) + NUM_ANSWER) // PAGE)))
    draw.shuffle(pages)
    kv = KVPool(loaded.layers, len(pages), PAGE, backend)
    runner = ModelRunner(loaded, kv)
    ends = range(len(prompt), len(prompt) + NUM_ANSWER)
    for start, end in (*pairwise(cuts), *pairwise(ends)):
        samples = end >= len(prompt)
        chunk = Chunk(request, start, end - start, as_page_table(pages), samples=samples)
        pending = runner.launch([chunk])
        runner.start(pending)
        for sampled in runner.collect(pending):
            if sampled is not None:
                request.token_ids.append(sampled.token_id)
    return list(request.token_ids[len(prompt) :])


def emulated() -> tuple[MetalBackend, set[str]]:
    """The kernels, and the names of those that ran."""
    ran: set[str] = set()
    make = emulated_factory()

    def factory(spec: KernelSpec, source: str) -> Kernel:
        kernel = make(spec, source)

        def call(**arguments: Any) -> list[mx.array]:
            ran.add(spec.name)
            return kernel(**arguments)

        return call

    return MetalBackend(factory), ran


def test_long_chunks_through_copies_and_decodes_after_them(build_model: BuildModel) -> None:
    model, config = build_model("llama", head_dim=64, num_hidden_layers=2)
    model.set_dtype(mx.float16)
    loaded = prepare(model, config, "half")
    backend, ran = emulated()
    cuts = (0, 20, 276, 300)
    assert answer(loaded, backend, cuts) == answer(loaded, ReferenceBackend(), cuts)
    assert {"gather_pages", "paged_prefill", "paged_decode"} <= ran


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [192, 256, 512])
def test_large_head_dimensions(head_dim: int, build_model: BuildModel) -> None:
    loaded = prepare(*build_model("qwen3", head_dim=head_dim, num_hidden_layers=2), "large heads")
    backend, ran = emulated()
    cuts = (0, 7, 40)
    assert answer(loaded, backend, cuts) == answer(loaded, ReferenceBackend(), cuts)
    assert {"paged_prefill", "paged_decode"} <= ran


@pytest.mark.slow
def test_latents(build_model: BuildModel) -> None:
    """Chunks and decodes over latents, which the reference attends without tiles or partitions."""
    loaded = prepare(*build_model("glm4_moe_lite", **LATENTS), "latents")
    assert all(spec.is_latent for spec in loaded.layers)
    backend, ran = emulated()
    cuts = (0, 7, 70)
    assert answer(loaded, backend, cuts) == answer(loaded, ReferenceBackend(), cuts)
    assert {"paged_latent", "merge_partitions", "write_kv_pages", "write_kv_tokens"} <= ran
