"""Embedding: one text as one vector, pooled from the hidden states that enter the model's head.

The text runs once through mlx-lm's dense path, in pieces, so that running answers get their steps
between two pieces. The hidden states are captured where the wrapped head receives them, the same
way for every architecture; the head itself is never computed, because mlx is lazy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels.reading import DeviceError, evaluate, read
from mlxserve.errors import InvalidParameter, InvalidRequest
from mlxserve.model.paged import RowSelector
from mlxserve.model.workers import Workers
from mlxserve.request import Pooling

_MODEL_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)


class Embedding:
    """One text being embedded. Lives on the engine's thread."""

    def __init__(
        self,
        model: nn.Module,
        selector: RowSelector,
        token_ids: Sequence[int],
        pooling: Pooling,
        dimensions: int | None = None,
        workers: Workers | None = None,
    ) -> None:
        """
        dimensions: length of the vector, which keeps the first ones; None keeps all
        workers: of several ranks, which compute the text together
        """
        self._model = model
        self._selector = selector
        self._token_ids = token_ids
        self._pooling = pooling
        self._dimensions = dimensions
        self._cache: list[Any] = make_prompt_cache(model)
        self._pooled: mx.array | None = None  # (hidden,), float32
        self._workers = workers
        self._number = 0 if workers is None else workers.begin_text()
        self.num_done = 0

    def advance(self, num_tokens: int) -> list[float] | None:
        """Compute up to `num_tokens` more tokens. Returns the unit vector once all are computed.

        Raises InvalidParameter for more dimensions than the model has, InvalidRequest for a model
        that does not expose its hidden states.
        """
        end = min(self.num_done + num_tokens, len(self._token_ids))
        try:
            hidden = self._hidden(self._token_ids[self.num_done : end])
            self._pooled = self._pooled_with(hidden)
            evaluate(self._pooled)
        except (InvalidRequest, DeviceError):  # the first is a ValueError as well
            raise
        except _MODEL_ERRORS as error:
            raise InvalidRequest(f"input: the model failed on it: {error}") from error
        self.num_done = end
        return self._vector() if end == len(self._token_ids) else None

    def release(self) -> None:
        """Free the arrays, finished or not."""
        if self._workers is not None:
            self._workers.embed(self._number, ())
        self._cache = []
        self._pooled = None

    def _hidden(self, token_ids: Sequence[int]) -> mx.array:
        """(tokens, hidden), not evaluated."""
        if self._workers is not None:
            self._workers.embed(self._number, token_ids)
        with self._selector.capturing() as captured:
            self._model(mx.array([token_ids]), cache=self._cache)
        if len(captured) != 1 or captured[0].shape[:-1] != (1, len(token_ids)):
            raise InvalidRequest("input: this model does not expose the hidden states of a text")
        return captured[0][0].astype(mx.float32)

    def _pooled_with(self, hidden: mx.array) -> mx.array:
        if self._pooling is Pooling.LAST:
            return hidden[-1]
        total = hidden.sum(axis=0)
        return total if self._pooled is None else self._pooled + total

    def _vector(self) -> list[float]:
        assert self._pooled is not None
        size = self._pooled.size
        if self._dimensions is not None and self._dimensions > size:
            raise InvalidParameter("dimensions", f"this model's vectors have {size}")
        kept = self._pooled[: self._dimensions]
        unit: list[float] = read(kept / mx.maximum(mx.linalg.norm(kept), 1e-12)).tolist()
        return unit
