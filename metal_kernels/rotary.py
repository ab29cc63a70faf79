"""rotate_and_write: all that lies between a layer's projections and its attention, as one op.

    queries ── norm ── RoPE ──▶ returned            (T, H, 1, D)
    keys ───── norm ── RoPE ──▶ the pool            the rows' slots
    values ── norm, if any ────▶ the pool

As ops of mlx they are five kernels of a layer's nineteen, and each waits for those before. `rotated` is the
specification in plain mlx; `RotatedWrites` has the kernel.

What RoPE does to a pair of dimensions is a rotation by an angle of the position. The caller passes cosines and
sines, `turns`, so that every kind of RoPE is the same here, and all layers of a step share them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from metal_kernels import kernels, quantised
from metal_kernels.kernels import FENCE, Dispatch, Kernels
from metal_kernels.ops import FLOATS, Backend, Heads, Norms, Projected, Slots
from metal_kernels.plans import upload
from metal_kernels.tables import Plans

_THREADS = 256


def rotated(
    projected: Projected, turns: mx.array, heads: Heads, norms: Norms
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values as models pass them to attention, (T, heads, 1, dim).

    projected: (T, 1, width) each, or (1, T, width)
    turns: (T, 1, 1, rotated) float32, the cosine and the sine of each pair, where its two elements are; not
        read where nothing is rotated
    """
    queries, keys, values = _separate(projected, heads)
    rows = max(queries.shape[:2])
    queries = queries.reshape(rows, heads.num, 1, -1)[..., : heads.dim]
    keys, values = (side.reshape(rows, heads.num_kv, 1, heads.dim) for side in (keys, values))
    if heads.epsilon is not None:
        assert norms is not None, "epsilons belong to norms"
        queries, keys = (
            mx.fast.rms_norm(side, weight, epsilon)
            for side, weight, epsilon in zip((queries, keys), norms, heads.epsilon, strict=False)
        )
        if heads.norms_values:
            values = mx.fast.rms_norm(values, None, heads.epsilon[-1])
    return _turned(queries, turns, heads), _turned(keys, turns, heads), values


def _separate(projected: Projected, heads: Heads) -> Projected:
    if len(projected) == 3:
        return projected
    first, second, _ = heads.widths
    return list(mx.split(projected[0], [first, first + second], axis=-1))


def _turned(rows: mx.array, turns: mx.array, heads: Heads) -> mx.array:
    if not heads.rotated:
        return rows
    kept, axis = rows[..., heads.rotated :], -1 if heads.is_traditional else -2
    cut = (-1, 2) if heads.is_traditional else (2, heads.rotated // 2)

    def pairs(array: mx.array) -> Sequence[mx.array]:
        pieces = array[..., : heads.rotated].astype(mx.float32).reshape(*array.shape[:3], *cut)
        return list(mx.split(pieces, 2, axis=axis))

    (first, second), (cosine, sine) = pairs(rows), pairs(turns)
    both = [first * cosine - second * sine, first * sine + second * cosine]
    turned = mx.concatenate(both, axis=axis).reshape(*rows.shape[:3], heads.rotated)
    return mx.concatenate([turned.astype(rows.dtype), kept], axis=-1)


def rotate_and_write(
    backend: Backend,
    projected: Projected,
    turns: mx.array,
    heads: Heads,
    norms: Norms,
    pools: tuple[mx.array, mx.array],
    slots: Slots,
    plans: Plans | None,
) -> tuple[mx.array, tuple[mx.array, mx.array]]:
    """Return the rotated queries and the new pools, computed by any backend's ops."""
    queries, keys, values = rotated(projected, turns, heads, norms)
    if not backend.takes_model_rows:
        keys, values = keys.squeeze(2), values.squeeze(2)
    return queries, backend.write_kv(keys, values, *pools, slots, plans)


class RotatedWrites:
    """The kernel of one backend."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._numbers: dict[tuple[float, ...], mx.array] = {}
        self._no_norms: dict[tuple[int, mx.Dtype], mx.array] = {}

    def dispatch(
        self,
        projected: Projected,
        turns: mx.array,
        heads: Heads,
        norms: Norms,
        moves: mx.array,
        k_pool: mx.array,
    ) -> Dispatch:
        """Dispatch the kernel for rows like these; moves: row and slot of every row.

        Raises ValueError for inconsistent arguments.
        """
        _check(projected, turns, heads, norms, k_pool)
        rows, dtype = max(projected[0].shape[:2]), projected[0].dtype
        epsilon = heads.epsilon or (0.0, 0.0)
        if epsilon not in self._numbers:
            self._numbers[epsilon] = upload([*epsilon, *[0.0] * (8 - len(epsilon))], np.float32)
        fixed = {"moves": moves, "numbers": self._numbers[epsilon]}
        if norms is None:
            fixed |= dict.fromkeys(("q_weight", "k_weight"), self._no_norm(heads.dim, dtype))
        simdgroups = heads.num + 2 * heads.num_kv
        return self._kernels.dispatch(
            kernels.ROTATE_AND_WRITE,
            fixed,
            {"rotated": ((rows, heads.num, 1, heads.dim), dtype), "fence": FENCE},
            [
                ("T", dtype),
                ("D", heads.dim),
                ("R", heads.rotated),
                ("HEADS", heads.num),
                ("STEP", heads.step or heads.dim),
                ("JOINED", int(len(projected) == 1)),
                ("NORMS", int(norms is not None) + int(heads.norms_values)),
                ("IS_TRADITIONAL", int(heads.is_traditional)),
                ("IS_QUANTISED", int(k_pool.dtype == quantised.DTYPE)),
            ],
            (32, simdgroups, rows),
            (32, min(simdgroups, _THREADS // 32), 1),
        )

    def _no_norm(self, dim: int, dtype: mx.Dtype) -> mx.array:
        if (dim, dtype) not in self._no_norms:
            self._no_norms[dim, dtype] = mx.zeros(dim, dtype)
        return self._no_norms[dim, dtype]


def _check(
    projected: Projected, turns: mx.array, heads: Heads, norms: Norms, k_pool: mx.array
) -> None:
    """Raises ValueError."""
    dtype = projected[0].dtype
    widths = heads.widths if len(projected) == 3 else (sum(heads.widths),)
    shapes = [array.shape for array in projected]
    *batch, _ = shapes[0]
    if len(batch) != 2 or 1 not in batch or shapes != [(*batch, width) for width in widths]:
        raise ValueError(f"projections are {shapes}; {heads} takes rows of {widths}")
    rows = max(batch)
    if heads.num % heads.num_kv or heads.rotated % 2 or heads.rotated > heads.dim:
        raise ValueError(f"{heads} does not describe heads")
    if turns.dtype != mx.float32 or turns.size < kernels.SMALLEST_INPUT:
        raise ValueError(f"turns are {turns.size} numbers of {turns.dtype}")
    if heads.rotated and turns.shape != (rows, 1, 1, heads.rotated):
        raise ValueError(f"turns are {turns.shape}; {heads} takes those of {rows} rows")
    if (norms is None) != (heads.epsilon is None):
        raise ValueError("norms have weights and epsilons, or neither")
    of_pool = quantised.head_dim_of(k_pool.shape[-1], k_pool.dtype)
    if (k_pool.shape[1], of_pool) != (heads.num_kv, heads.dim):
        raise ValueError(f"the pool has {k_pool.shape[1]} kv heads of {of_pool}, not as {heads}")
    kinds = {array.dtype for array in (*projected, *(norms or ()))}
    if len(kinds) > 1 or dtype not in FLOATS or k_pool.dtype not in (dtype, quantised.DTYPE):
        raise ValueError(
            f"projections and norms are {kinds}, the pool is {k_pool.dtype}: they must be alike"
        )
