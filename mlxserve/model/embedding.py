"""Embedding: one text as one vector, pooled from the hidden states that enter the model's head.

The hidden states are captured where the wrapped head receives them, the same way for every
architecture; the head itself is never computed, because mlx is lazy.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from metal_kernels.reading import evaluate, read
from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.model.dense_text import DenseText
from mlxserve.model.paged import RowSelector
from mlxserve.model.workers import Workers
from mlxserve.request import Pooling


class Embedding(DenseText[list[float]]):
    """One text being embedded: a unit vector.

    `advance` also raises InvalidParameter for more dimensions than the model has, and InvalidRequest
    for a model that does not expose its hidden states.
    """

    def __init__(
        self,
        model: nn.Module,
        selector: RowSelector,
        token_ids: Sequence[int],
        pooling: Pooling,
        dimensions: int | None = None,
        workers: Workers | None = None,
    ) -> None:
        """`dimensions`: length of the vector, which is truncated to it; None keeps all."""
        super().__init__(model, token_ids, workers)
        self._selector = selector
        self._pooling = pooling
        self._dimensions = dimensions
        self._pooled: mx.array | None = None  # (hidden,), float32

    def release(self) -> None:
        super().release()
        self._pooled = None

    def _compute(self, start: int, end: int) -> None:
        self._pooled = self._pooled_with(self._hidden(start, end))
        evaluate(self._pooled)

    def _hidden(self, start: int, end: int) -> mx.array:
        """Return (tokens, hidden), not evaluated."""
        with self._selector.capturing() as captured:
            self._logits(start, end)
        if len(captured) != 1 or captured[0].shape[:-1] != (1, end - start):
            raise InvalidRequest("input: this model does not expose the hidden states of a text")
        return captured[0][0].astype(mx.float32)

    def _pooled_with(self, hidden: mx.array) -> mx.array:
        if self._pooling is Pooling.LAST:
            return hidden[-1]
        total = hidden.sum(axis=0)
        return total if self._pooled is None else self._pooled + total

    def _result(self) -> list[float]:
        assert self._pooled is not None
        size = self._pooled.size
        if self._dimensions is not None and self._dimensions > size:
            raise InvalidParameter("dimensions", f"this model's vectors have {size}")
        kept = self._pooled[: self._dimensions]
        unit: list[float] = read(kept / mx.maximum(mx.linalg.norm(kept), 1e-12)).tolist()
        return unit
