"""Instructions of the attention kernels, counted by the emulator (`tests/emulator/counting.py`).

What a simdgroup issues for one more key and query head: the difference of two runs, divided by the keys and
heads that only the longer one has. So a decode's partitions and their merge are in it, and what a kernel does
once is not. Numbers are random, as a maximum that grows costs more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels.kernels import Kernel, KernelSpec
from metal_kernels.latents import LATENT_DIMS
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.speeds import PAGE_SIZE, TimedAttention
from tests.emulated import emulated_factory
from tests.emulator import MetalKernel

SHORT, LONG = 256, 512  # positions: one and two partitions of a decode with 8 kv heads
_ATTENTION = ("paged_", "grouped_", "merge_")  # beginnings of the kernels' names
_KV_HEADS = 8
_LATENT_HEADS = 32


@functools.cache
def decode(
    group: int, head_dim: int = 128, *, is_quantised: bool = False, uses_matrices: bool = True
) -> float:
    """A key and head of decodes in float16, with `group` query heads per kv head."""
    what = TimedAttention(
        LONG, kv_heads=_KV_HEADS, head_dim=head_dim, group=group, is_quantised=is_quantised
    )
    return _for_each(what, _attend, _KV_HEADS * group, uses_matrices=uses_matrices)


@functools.cache
def tiles(head_dim: int = 128, *, is_quantised: bool = False, rows: int = 16) -> float:
    """A key and head of a row of a chunk in float16, by the tile kernel, four query heads per kv head."""
    what = TimedAttention(
        LONG, rows=rows, kv_heads=1, head_dim=head_dim, group=4, is_quantised=is_quantised
    )
    return _for_each(what, _attend, rows * what.group)


@functools.cache
def latents(rows: int, dims: tuple[int, int] = LATENT_DIMS[0]) -> float:
    """A position and head of a row over latents in float16; rows: 1 for a decode"""
    what = TimedAttention(LONG, rows=rows, group=_LATENT_HEADS)
    attend = functools.partial(_attend_latents, dims=dims)
    return _for_each(what, attend, rows * _LATENT_HEADS)


def _for_each(
    what: TimedAttention,
    attend: Callable[[MetalBackend, TimedAttention], mx.array],
    num_heads: int,
    *,
    uses_matrices: bool = True,
) -> float:
    counts = []
    for context in (SHORT, LONG):
        counting = _Counting()
        backend = MetalBackend(counting, uses_matrices=uses_matrices)
        mx.eval(attend(backend, replace(what, context=context)))
        counts.append(counting.num_instructions)
    return (counts[1] - counts[0]) / ((LONG - SHORT) * num_heads)


class _Counting:
    """A factory of kernels whose instructions are added, if they are attention's."""

    def __init__(self) -> None:
        self._make = emulated_factory(count=True)
        self.num_instructions = 0.0

    def __call__(self, spec: KernelSpec, source: str) -> Kernel:
        kernel = self._make(spec, source)
        assert isinstance(kernel, MetalKernel)

        def run(**arguments: Any) -> list[mx.array]:
            outputs = kernel(**arguments)
            assert kernel.statistics is not None
            if spec.name.startswith(_ATTENTION):
                self.num_instructions += kernel.statistics.num_instructions
            return outputs

        return run


def _attend(backend: MetalBackend, what: TimedAttention) -> mx.array:
    shape = what.num_pages, what.kv_heads, PAGE_SIZE, what.head_dim
    k_pool, v_pool = (backend.new_pool(*shape, what.pool_dtype) for _ in range(2))
    rows = [_draw((what.context, *shape[1::2]), what.dtype, seed) for seed in (1, 2)]
    backend.write_kv(rows[0], rows[1], k_pool, v_pool, np.arange(what.context, dtype=np.int32))
    op = backend.paged_decode if what.rows == 1 else backend.attend_tiles
    return op(what.queries(), k_pool, v_pool, what.tables(), Attention(what.scale))


def _attend_latents(backend: MetalBackend, what: TimedAttention, dims: tuple[int, int]) -> mx.array:
    k_pool, v_pool = (
        backend.new_pool(what.num_pages, 1, PAGE_SIZE, dim, what.dtype) for dim in dims
    )
    rows = [_draw((what.context, 1, dim), what.dtype, dim) for dim in dims]
    backend.write_kv(rows[0], rows[1], k_pool, v_pool, np.arange(what.context, dtype=np.int32))
    scale = sum(dims) ** -0.5
    latent, rope = (_draw((what.rows, what.group, dim), what.dtype, 3) for dim in dims)
    rope = (rope * scale).astype(what.dtype)
    return backend.paged_latent(latent, rope, k_pool, v_pool, what.tables(), scale=scale)


def _draw(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
