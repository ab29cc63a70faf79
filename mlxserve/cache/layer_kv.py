"""LayerKV: the cache that one layer of a model is given in a step, over the arrays of a KVPool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from metal_kernels.ops import Attention, Heads, Norms, Projected
from mlxserve.cache import key_owners
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.cache.layout import StepLayout


class Turning(Protocol):
    """The rotation of some layers, all alike."""

    def turns(self, positions: mx.array) -> mx.array:
        """(T, 1, 1, rotated) float32, as `rotate_and_write` takes them."""


@dataclass(frozen=True, slots=True)
class PagedWindow:
    """Passed through the model as its mask: the rows of this layer see `size` positions."""

    size: int


class LayerKV:
    """One layer's cache for one step, with the three names that mlx-lm's models use.

    Rows are batch entries of length 1: keys arrive as (T, kv_heads, 1, head_dim), `offset` is the
    position of every row, and no mask is needed because a row attends to its own pages only. Where a
    step is called as (1, T), its layers are fused, which pass rows all the same.
    """

    # `__dict__`: definitions of mlx-vlm keep notes of their own on a cache.
    __slots__ = ("__dict__", "_index", "_pool", "_spec", "_step", "_written", "offset")

    def __init__(
        self, pool: KVPool, index: int, step: StepLayout, spec: LayerSpec | None = None
    ) -> None:
        """Take the pool's layer `index`; `spec` replaces that of the pool."""
        self._pool = pool
        self._index = index
        self._spec = spec or pool.specs[index]
        self._step = step
        self.offset = step.positions if step.offset is None else step.offset
        self._written: tuple[mx.array, mx.array] | None = None

    @classmethod
    def elsewhere(cls, pool: KVPool, window: int | None, step: StepLayout) -> LayerKV:
        """Return the cache of a layer on another rank, which only makes masks."""
        return cls(pool, -1, step, LayerSpec(0, 0, 0, mx.float32, window))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows = self._pool.rows(self._index, keys), self._pool.rows(self._index, values)
        self._pool.write(self._index, *rows, self._step)
        if self._spec.is_latent:
            return keys, _handing_over(values)
        self._written = keys, values
        key_owners.remember(keys, self)
        return keys, values

    def turns(self, rope: Turning) -> mx.array:
        """Return the rotation of the rows, computed once in a step for all layers with the same `rope`."""
        turns = self._step.turns.get(rope)
        if turns is None:
            turns = self._step.turns[rope] = rope.turns(self._step.positions)
        return turns

    def rotate_and_write(
        self, projected: Projected, turns: mx.array, heads: Heads, norms: Norms
    ) -> mx.array:
        """Write the rows in place of `update_and_fetch`; return queries (T, heads, 1, head_dim)."""
        return self._pool.rotate_and_write(self._index, projected, turns, heads, norms, self._step)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the keys and values written in this step, for layers that share the pages."""
        assert self._written is not None, "the layer has written nothing yet"
        return self._written

    def make_mask(
        self,
        N: int,  # noqa: N803 (the name in mlx-lm's caches)
        return_array: bool = False,  # noqa: ARG002
        window_size: int | None = None,
    ) -> PagedWindow | None:
        """Return a PagedWindow for `attend`, or None if the window is the layer's own."""
        if N != 1 and self._step.offset is None:
            raise ValueError(f"rows of a paged step have length 1, got {N}")
        if window_size is None or window_size == self._spec.window:
            return None
        return PagedWindow(window_size)

    def attend(
        self,
        queries: mx.array,  # (T, heads, 1, head_dim)
        *,
        scale: float,
        mask: object = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend over the rows' own pages: (T, heads, 1, head_dim).

        Raises ValueError for a mask not made by `make_mask`.
        """
        if self._spec.is_latent:
            return self._attend_latent(queries, mask, scale=scale)
        if mask is not None and not isinstance(mask, PagedWindow):
            raise ValueError(f"attention with a mask of the model's own ({type(mask).__name__})")
        window = mask.size if mask is not None else self._spec.window
        output = self._pool.attend(
            self._index,
            self._pool.rows(self._index, queries),
            self._step,
            Attention(scale, window, softcap),
            sinks,
        )
        return output if output.ndim == 4 else mx.expand_dims(output, 2)

    def _attend_latent(self, queries: mx.array, rotated: object, *, scale: float) -> mx.array:
        """Attend with latent vectors; `rotated` is the mask, (T, heads, 1, rotated dim), already scaled."""
        if not isinstance(rotated, mx.array):
            raise ValueError("latent attention without the rotated part of its queries")
        output = self._pool.attend_latent(
            self._index, queries.squeeze(2), rotated.squeeze(2), self._step, scale=scale
        )
        return mx.expand_dims(output, 2)


def _handing_over(rotated: mx.array) -> mx.array:
    """Return keys that make a model pass its rotated queries to `attend` as its mask.

    The model multiplies them, scaled, with the rotated keys that it is given, and passes the product on
    as its mask. With an identity in place of the keys, the product is the queries, bit by bit.
    """
    return mx.eye(rotated.shape[-1], dtype=rotated.dtype)[None, None]
