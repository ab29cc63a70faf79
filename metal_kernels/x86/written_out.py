r"""Attention of chunks written out in tiles, in float32 on a CPU.

    positions ->      seen by all rows of a tile   its triangle
    rows 0 .. 63      | .........................| \ |
    rows 64 .. 127    | ................................| \ |

mlx's softmax on Linux is scalar. Written out it is a dozen passes over the scores, which pay only
while these stay in a core's cache: a tile is as many rows, and of these as many kv heads, as have
about a megabyte of scores. What lies above the diagonal is not computed.

CPU time of one x86 thread (2 MB of L2), 12 query and 4 kv heads of 64 dimensions, relative to mlx's own
kernel: 300 rows over 300 positions 0.29, 512 over 1,536 0.38, 512 over 3,072 0.44, 1,500 over 1,500 0.23.
(Before rows were reduced as in `reductions.py`, which takes 15 % less of them.)
Without tiles 1,500 rows took 3.4 times as long as mlx's kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.ops import Attention
from metal_kernels.tables import IntArray
from metal_kernels.x86.exponential import LOG2_E, exp2, tanh
from metal_kernels.x86.reductions import row_max, row_sum

TILE_SCORES = 1 << 18  # float32
# More are not faster, and compute more above the diagonal.
_TILE_ROWS = 64
# Fewer make products of a few rows, which take a CPU as long as these.
_MIN_ROWS = 8


def attend_written_out(
    queries: mx.array,  # (1, heads, rows, head_dim), the last positions of the keys
    keys: mx.array,  # (1, kv_heads, positions, head_dim)
    values: mx.array,  # (1, kv_heads, positions, value_dim)
    attention: Attention,
    sinks: mx.array | None = None,  # (heads,)
    ends: IntArray | None = None,  # (rows,), as `mlx_attention.attend` takes them
) -> mx.array:
    """Return (1, heads, rows, value_dim), causal but for `ends`, in float32 with powers of two."""
    scale, window, softcap = attention
    _, heads, rows, head_dim = queries.shape
    kv_heads, positions = keys.shape[1:3]
    group = heads // kv_heads
    factor = scale * (LOG2_E if softcap is None else 1 / softcap)
    scaled = (queries * factor).reshape(kv_heads, group, rows, head_dim)
    if sinks is not None:
        sinks = LOG2_E * sinks.astype(mx.float32).reshape(kv_heads, group, 1, 1)
    outputs = []
    for first, last in _row_tiles(rows, positions, group):
        begin, end, added = _seen_by(
            first - rows + positions,
            last - rows + positions,
            window,
            None if ends is None else ends[first:last],
        )
        parts = [
            _attend_tile(
                scaled[of_heads, :, first:last],
                keys[0, of_heads, begin:end],
                values[0, of_heads, begin:end],
                added,
                softcap,
                None if sinks is None else sinks[of_heads],
            )
            for of_heads in _head_tiles(kv_heads, (last - first) * group * (end - begin))
        ]
        outputs.append(parts[0] if len(parts) == 1 else mx.concatenate(parts))
    output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
    return output.reshape(1, heads, rows, values.shape[-1]).astype(queries.dtype)


def attend_latents_written_out(
    q_latent: mx.array,  # (rows, heads, latent_dim), the last positions of the latents
    q_rope: mx.array,  # (rows, heads, rope_dim), scaled
    latents: mx.array,  # (positions, latent_dim): keys and values at once
    keys: mx.array,  # (positions, rope_dim)
    *,
    scale: float,
) -> mx.array:
    """Return (rows, heads, latent_dim), causal, of one sequence.

    Latents and rotated keys are one product.
    """
    queries = mx.concatenate([q_latent * scale, q_rope], axis=-1)[None].swapaxes(1, 2)
    both = mx.concatenate([latents, keys], axis=-1)[None, None]
    output = attend_written_out(queries, both, latents[None, None], Attention(1.0))
    return output.squeeze(0).swapaxes(0, 1)


def _head_tiles(kv_heads: int, scores_of_head: int) -> Sequence[slice]:
    step = max(1, min(kv_heads, TILE_SCORES // scores_of_head))
    return [slice(at, at + step) for at in range(0, kv_heads, step)]


def _row_tiles(rows: int, positions: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, row after the last) of each tile."""
    first = 0
    while first < rows:
        longest = positions - rows + first + _TILE_ROWS
        fitting = max(_MIN_ROWS, TILE_SCORES // (group * longest))
        last = min(rows, first + min(_TILE_ROWS, fitting))
        yield first, last
        first = last


def _seen_by(
    first: int, last: int, window: int | None, ends: IntArray | None = None
) -> tuple[int, int, mx.array | None]:
    """Positions that the rows `first` to `last` see, and the array to add there.

    The array is added to the last columns of the scores; None if a single row sees all.
    """
    rows = last - first
    if ends is None and (window is None or last <= window):
        return 0, last, mx.array(_triangle(rows)) if rows > 1 else None
    row = np.arange(first, last)[:, None]
    end, last_seen = (last, row) if ends is None else (int(ends.max()), ends[:, None] - 1)
    # Without a window every row sees all positions before the first row.
    begin, column = 0, np.arange(first, end)
    if window is not None:
        begin = max(0, first - window + 1)
        column = np.arange(begin, end)
    is_seen = (column <= last_seen) & (column > row - (window or end))
    return begin, end, mx.array(np.where(is_seen, np.float32(0), np.float32(-np.inf)))


@functools.lru_cache(maxsize=_TILE_ROWS)
def _triangle(rows: int) -> npt.NDArray[np.float32]:
    """0, and minus infinity above the diagonal.

    A choice (mx.where) costs as much as an exponential on a CPU, an addition a fortieth.
    """
    return np.triu(np.full((rows, rows), -np.inf, np.float32), k=1)


def _attend_tile(
    queries: mx.array,  # (kv_heads, group, rows, head_dim)
    keys: mx.array,  # (kv_heads, positions, head_dim)
    values: mx.array,  # (kv_heads, positions, value_dim)
    added: mx.array | None,  # (..., rows, columns): added to the last columns
    softcap: float | None,
    sinks: mx.array | None,  # (kv_heads, group, 1, 1)
) -> mx.array:
    """Return (kv_heads, group, rows, value_dim) float32."""
    kv_heads, group, rows, head_dim = queries.shape
    positions = keys.shape[1]
    # All queries of a kv head are rows of one product.
    product = queries.reshape(kv_heads, group * rows, head_dim) @ keys.swapaxes(-1, -2)
    scores = product.astype(mx.float32).reshape(kv_heads, group, rows, positions)
    if softcap is not None:
        scores = softcap * LOG2_E * tanh(scores)
    if added is not None:
        last = slice(positions - added.shape[-1], None)
        scores[..., last] = scores[..., last] + added
    largest = row_max(scores)
    if sinks is not None:
        largest = mx.maximum(largest, sinks)
    weights = exp2(scores, largest)
    total = row_sum(weights)
    if sinks is not None:
        total = total + exp2(sinks, largest)
    weights = weights.astype(values.dtype).reshape(kv_heads, group * rows, positions)
    output = (weights @ values).reshape(kv_heads, group, rows, values.shape[-1])
    return output / total
