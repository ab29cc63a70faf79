"""An oracle for `paged_latent`: attention over latents in float64 numpy, without pages.

A `Case` with one kv head describes it: `group` query heads, latents of `key_dim` dimensions, rotated
keys of `value_dim`.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.ops import Backend
from metal_kernels.rounding import row_error
from tests.metal_kernels.oracle import Case, Paged, draw


def latent_case(
    sequences: tuple[tuple[int, int], ...],
    heads: int,
    dims: tuple[int, int] = (64, 16),
    dtype: mx.Dtype = mx.float32,
    *,
    page_size: int = 16,
    is_scattered: bool = True,
) -> Case:
    return Case(
        sequences,
        page_size,
        kv_heads=1,
        group=heads,
        key_dim=dims[0],
        value_dim=dims[1],
        dtype=dtype,
        is_scattered=is_scattered,
    )


class PagedLatents:
    """A case in a backend's pool. `answer` is the backend's, `expected` the oracle's."""

    def __init__(self, backend: Backend, case: Case) -> None:
        rng = np.random.default_rng(1)
        self._backend = backend
        self._case = case
        self.paged = Paged(backend, case)
        self.scale = case.key_dim**-0.5
        rows = self.paged.tables.num_rows
        self.q_latent = draw(rng, (rows, case.group, case.key_dim), case.dtype)
        # Scores of the same size from both halves.
        ropes = draw(rng, (rows, case.group, case.value_dim), case.dtype) * case.value_dim**-0.5
        self.q_rope = ropes.astype(case.dtype)

    def answer(self) -> np.ndarray:
        """(rows, heads, latent_dim) float64."""
        output = self._backend.paged_latent(
            self.q_latent, self.q_rope, *self.paged.pools(), self.paged.tables, scale=self.scale
        )
        assert output.dtype == self._case.dtype
        return np.array(output.astype(mx.float32)).astype(np.float64)

    def expected(self) -> np.ndarray:
        q_latent, q_rope = (_floats(rows) for rows in (self.q_latent, self.q_rope))
        output = np.empty_like(q_latent)
        for sequence, first, end in self.paged.tables.queries():
            context = int(self.paged.tables.context_lens[sequence])
            latents, keys = (side[sequence][:, 0] for side in self.paged.keys_and_values())
            for row in range(first, end):
                seen = slice(0, context - (end - row) + 1)
                scores = q_latent[row] @ latents[seen].T * self.scale + q_rope[row] @ keys[seen].T
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                output[row] = weights / weights.sum(axis=1, keepdims=True) @ latents[seen]
        return output

    def error(self) -> float:
        """The largest difference relative to the largest value; NaN where the answer has one."""
        return row_error(self.answer(), self.expected())

    @property
    def tolerance(self) -> float:
        return self.paged.tolerance


def _floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)
