"""Tries on this machine whether the tile kernel of cooperative tensors computes what the other one does.

Which lane holds which number of a cooperative tensor is no part of Metal's interface. On a machine
with another map every answer would be wrong, so the first one is compared at each load, which also
compiles the kernel. Where it is faster is timed by `chunk_trial.py`.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from metal_kernels.cooperative_tiles import is_supported
from metal_kernels.few_rows_trial import REFUSALS
from metal_kernels.long_chunks import has_accelerators
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.reading import evaluate, read
from metal_kernels.rounding import TOLERANCES, row_error
from metal_kernels.speeds import TimedAttention
from metal_kernels.tables import SequenceTables

# Rows of two tiles and of a part of one, behind positions that end within a page.
_ROWS, _CONTEXT = 75, 331
# Rows of an image, which ends inside a tile.
_IMAGE = slice(9, 50)
_WINDOWS, _SOFTCAP = (None, 97), 2.0


def why_not_cooperative(
    backend: MetalBackend, what: TimedAttention, *, has_ends: bool
) -> str | None:
    """Return why chunks of a layer like `what` do not go by cooperative tensors; None if they may.

    has_ends: rows of an image may see all of it, for which the kernel is compiled once more
    """
    if not is_supported(what.head_dim, what.dtype):
        return "the kernel does not have this head dimension or dtype"
    if not has_accelerators(what.dtype):
        return "there are no neural accelerators"
    try:
        error = difference(backend, what, has_ends=has_ends)
    except REFUSALS as refused:
        return f"the kernel does not run: {str(refused).strip()[:200]}"
    if not error <= 2 * TOLERANCES[what.dtype]:
        return f"its results differ from the other tile kernel's by {error:.0e}"
    return None


def difference(backend: MetalBackend, what: TimedAttention, *, has_ends: bool) -> float:
    """The largest difference of a row between both tile kernels, relative to the row; NaN for NaN.

    Of every text that `what` needs: with the ends of an image as well, if there may be some. Windows,
    softcaps and sinks are arguments of the same text.
    """
    layer = replace(what, context=_CONTEXT, rows=_ROWS, batch=1)
    shape = layer.num_pages, layer.kv_heads, layer.page_size, layer.head_dim
    k_pool, v_pool = (backend.new_pool(*shape, layer.pool_dtype) for _ in range(2))
    tables = layer.tables()
    rows = (_CONTEXT, layer.kv_heads, layer.head_dim)
    keys, values = (
        mx.random.normal(rows, key=mx.random.key(seed)).astype(layer.dtype) for seed in (3, 4)
    )
    backend.write_kv(keys, values, k_pool, v_pool, tables.slots(0, np.arange(_CONTEXT)))
    queries, worst = layer.queries(), 0.0
    evaluate(queries)
    sinks = mx.random.normal((queries.shape[1],), key=mx.random.key(5)).astype(layer.dtype)
    kinds: list[tuple[Attention, mx.array | None]] = [
        *((Attention(layer.scale, window=window), None) for window in _WINDOWS),
        (Attention(layer.scale, softcap=_SOFTCAP), sinks),
    ]
    for seen in [tables, _with_image(tables)] if has_ends else [tables]:
        for attention, own in kinds:
            expected, found = (
                read(
                    backend.attend_tiles(
                        queries, k_pool, v_pool, seen, attention, own, is_cooperative=each
                    ).astype(mx.float32)
                )
                for each in (False, True)
            )
            worst = float(np.maximum(worst, row_error(found, expected)))
    return worst


def _with_image(tables: SequenceTables) -> SequenceTables:
    """The same rows, some of which are an image's that see all of it."""
    ends = np.arange(_CONTEXT - _ROWS, _CONTEXT, dtype=np.int32) + 1
    ends[_IMAGE] = ends[_IMAGE][-1]
    return replace(tables, ends=ends)
