"""TextWork, computation on texts between steps, and DenseText, which runs one text densely.

A text goes through mlx-lm's dense path in pieces, beside the pages. Running answers get their steps
between two pieces. Every piece continues where the previous one ended, over a dense cache of the
text's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels.reading import DeviceError
from mlxserve.core.errors import InvalidRequest
from mlxserve.model.adapters import AppliedAdapter
from mlxserve.model.workers import Workers

_MODEL_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)

Result = TypeVar("Result")


class TextWork(ABC, Generic[Result]):
    """Texts being computed to a `Result`. Lives on the engine's thread."""

    num_done = 0  # tokens

    @abstractmethod
    def advance(self, num_tokens: int) -> Result | None:
        """Compute about `num_tokens` more tokens; return the result once all are computed.

        Raises InvalidRequest if the model fails on a text, and DeviceError.
        """

    @abstractmethod
    def release(self) -> None:
        """Free the arrays, finished or not."""


class DenseText(TextWork[Result]):
    """One text; computes at most the tokens that `advance` is called with."""

    def __init__(
        self, model: nn.Module, token_ids: Sequence[int], workers: Workers | None = None
    ) -> None:
        """`workers`: the other ranks, which compute the text together with this one."""
        self._model = model
        self._token_ids = token_ids
        self._cache: list[Any] = make_prompt_cache(model)
        self._workers = workers
        adapter = model.adapter_number if isinstance(model, AppliedAdapter) else None
        self._number = 0 if workers is None else workers.begin_text(adapter)

    def advance(self, num_tokens: int) -> Result | None:
        end = min(self.num_done + num_tokens, len(self._token_ids))
        try:
            self._compute(self.num_done, end)
        except (InvalidRequest, DeviceError):
            # The first is a ValueError as well.
            raise
        except _MODEL_ERRORS as error:
            raise InvalidRequest(f"input: the model failed on it: {error}") from error
        self.num_done = end
        return self._result() if end == len(self._token_ids) else None

    def release(self) -> None:
        if self._workers is not None:
            self._workers.embed(self._number, ())
        self._cache = []

    def _logits(self, start: int, end: int) -> mx.array:
        """Return (1, tokens, vocabulary) of the next tokens, not evaluated."""
        token_ids = self._token_ids[start:end]
        if self._workers is not None:
            self._workers.embed(self._number, token_ids)
        logits: mx.array = self._model(mx.array([token_ids]), cache=self._cache)
        return logits

    @abstractmethod
    def _compute(self, start: int, end: int) -> None:
        """Evaluate the tokens from `start` to `end`."""

    @abstractmethod
    def _result(self) -> Result: ...
