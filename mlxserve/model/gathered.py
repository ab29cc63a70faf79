"""GatheredKV: a layer's cache if the model is called for one sequence.

The layer's pages as plain arrays, for models whose attention is not the usual one: with masks of
their own, an index over all keys, or a convolution over them.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from mlxserve.cache.kv import KVPool
from mlxserve.cache.layout import StepLayout


class GatheredKV:
    """A cache with mlx-lm's interface over one sequence's pages.

    The whole sequence is present, so a window is a mask, and nothing is ever trimmed.
    """

    start_position = 0  # first position that a chunked cache still has

    def __init__(self, pool: KVPool, index: int, step: StepLayout, offset: int) -> None:
        """`offset`: position of the step's first row."""
        self._pool = pool
        self._index = index
        self._step = step
        self._start = offset
        self.offset = offset
        # Some models attach dependencies to them; nobody reads them again.
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def maybe_trim_front(self) -> None:
        """Do nothing: masks exclude positions that a chunk does not see."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (1, kv_heads, rows, dim) and return those of the whole sequence."""
        rows = keys[0].swapaxes(0, 1), values[0].swapaxes(0, 1)
        self._pool.write(self._index, *rows, self._step)
        self.offset = self._start + keys.shape[2]
        self.keys, self.values = self._pool.gather(self._index, self._step)
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the whole sequence, for layers that share them."""
        assert self.keys is not None, "the layer has written nothing yet"
        assert self.values is not None
        return self.keys, self.values

    def make_mask(
        self,
        N: int,  # noqa: N803  # mlx-lm's models may pass it by name
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        window = window_size or self._pool.specs[self._index].window
        if window is not None and self.offset + N > window:
            windowed: mx.array = create_causal_mask(N, self.offset, window_size=window)
            return windowed
        if N == 1:
            return None
        causal: mx.array | str = create_causal_mask(N, self.offset) if return_array else "causal"
        return causal
